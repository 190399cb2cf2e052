"""Checks one recorded line about block hashes against our hasher."""

import ast
import enum
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from reprise_cli.conformance_runner import Outcome, Row, first_difference
from reprise_core.extra_keys import (
    HashInputs,
    LoraAdapter,
    MmItem,
    PromptEmbeds,
    event_extra_keys,
    hashed_extra_keys,
)
from reprise_core.hash_algorithms import HashAlgorithm, digest_value, external_hash, serialize
from reprise_core.hash_chain import BlockHasher, coarse_view
from reprise_core.ids import BlockHash, GroupId, group_key, split_group_key
from reprise_core.kv_events import event_hash
from reprise_core.native_encoding import Encoding
from reprise_core.none_hash import none_hash, seed_text

Pairs = Iterator[tuple[str, object, object]]


def check_hash_row(row: Row, *, encoding: Encoding = Encoding.AUTO) -> Outcome:
    if row["kind"] == "typing":
        return _check_typing(row)
    check = _CHECKS[row["kind"]]
    return first_difference(row["kind"], _all_pairs(row, check, encoding))


def _all_pairs(row: Row, check: Callable[[Row, BlockHasher], Pairs], encoding: Encoding) -> Pairs:
    algorithm = HashAlgorithm(row["algo"])
    yield "none_hash_seed", row["none_hash_seed"], seed_text(algorithm, row["pythonhashseed"])
    first_parent = none_hash(algorithm, row["none_hash_seed"])
    yield "none_hash", row["none_hash"], first_parent.hex()
    block_size = row["hash_block_size"] if "hash_block_size" in row else row.get("block_size", 1)
    yield from check(
        row,
        BlockHasher(
            algorithm=algorithm,
            block_size=block_size,
            none_hash=first_parent,
            lookahead=row.get("lookahead", 0),
            encoding=encoding,
        ),
    )


def _chain(row: Row, hasher: BlockHasher) -> Pairs:
    inputs, token_ids = _request(row)
    chain = hasher.chain(inputs)
    hashes = chain.append(token_ids)
    yield "hashes", row["hashes"], _hex(hashes)
    yield from _extra_keys(row, hasher, inputs, len(hashes))
    yield "external_ints", row["external_ints"], [external_hash(block_hash) for block_hash in hashes]
    if "group_keys" in row:
        yield from _group_keys(row["group_keys"], hashes[:2])
    if "hashed_token_ids" in row:
        hashed = token_ids
        if inputs.prompt_embeds is not None:
            hashed = inputs.prompt_embeds.zeroed(token_ids, 0)
        yield "hashed_token_ids", row["hashed_token_ids"], hashed
    if "lookahead_token_ids" in row:
        size, lookahead = hasher.block_size, hasher.lookahead
        ends = range(size, (len(hashes) + 1) * size, size)
        yield (
            "lookahead_token_ids",
            row["lookahead_token_ids"],
            [token_ids[end : end + lookahead] for end in ends],
        )


def _extra_keys(row: Row, hasher: BlockHasher, inputs: HashInputs, num_blocks: int) -> Pairs:
    tagged = hashed_extra_keys(
        inputs,
        block_size=hasher.block_size,
        first_block=0,
        num_blocks=num_blocks,
        lookahead=hasher.lookahead,
    )
    untagged = event_extra_keys(
        inputs,
        block_size=hasher.block_size,
        first_block=0,
        num_blocks=num_blocks,
        lookahead=hasher.lookahead,
    )
    yield "extra_keys", row["extra_keys"], _json(tagged) if any(tagged) else None
    yield "event_extra_keys", row["event_extra_keys"], _json(untagged)


def _incremental(row: Row, hasher: BlockHasher) -> Pairs:
    inputs, token_ids = _request(row)
    chain = hasher.chain(inputs)
    yield "initial_hashes", row["initial_hashes"], _hex(chain.append(token_ids))
    for number, step in enumerate(row["steps"]):
        new_hashes = chain.append(step["append"])
        yield f"steps[{number}].num_tokens", step["num_tokens"], chain.num_tokens
        yield f"steps[{number}].new_hashes", step["new_hashes"], _hex(new_hashes)
    known = row["initial_hashes"] + [text for step in row["steps"] for text in step["new_hashes"]]
    yield "all hashes", known, _hex(chain.hashes)


def _serialization(row: Row, hasher: BlockHasher) -> Pairs:
    inputs, token_ids = _request(row)
    algorithm = hasher.algorithm
    yield (
        "none_hash_serialized",
        row["none_hash_serialized"],
        serialize(algorithm, row["none_hash_seed"]).hex(),
    )
    hashes = hasher.chain(inputs).append(token_ids)
    extras = hashed_extra_keys(inputs, block_size=hasher.block_size, first_block=0, num_blocks=len(hashes))
    yield "number of blocks", len(row["blocks"]), len(hashes)
    parent = hasher.none_hash
    for index, block in enumerate(row["blocks"]):
        start = index * hasher.block_size
        value = (parent, tuple(token_ids[start : start + hasher.block_size]), extras[index])
        yield f"blocks[{index}].parent", block["parent"], parent.hex()
        yield f"blocks[{index}].types", block["types"], [type(member).__name__ for member in value]
        yield f"blocks[{index}].extra_keys", block["extra_keys"], _json(extras[index])
        yield f"blocks[{index}].serialized", block["serialized"], serialize(algorithm, value).hex()
        yield f"blocks[{index}].hash", block["hash"], hashes[index].hex()
        parent = hashes[index]


def _coarse_view(row: Row, hasher: BlockHasher) -> Pairs:
    inputs, token_ids = _request(row)
    hashes = hasher.chain(inputs).append(token_ids)
    yield "hashes", row["hashes"], _hex(hashes)
    factor = row["block_size"] // row["hash_block_size"]
    yield "coarse_hashes", row["coarse_hashes"], _hex(coarse_view(hashes, factor))


def _external(row: Row, hasher: BlockHasher) -> Pairs:
    hashes = [BlockHash(bytes.fromhex(text)) for text in row["hashes"]]
    as_bytes = [event_hash(block_hash, as_integer=False) for block_hash in hashes]
    as_integers = [event_hash(block_hash, as_integer=True) for block_hash in hashes]
    yield "flag_0", row["flag_0"], _json(as_bytes)
    yield "flag_1", row["flag_1"], as_integers
    yield "flag_unset", row["flag_unset"], as_integers
    yield from _group_keys(row["group_keys"], hashes)
    for index, (digest, group) in enumerate(row["unpacked"]):
        unpacked = split_group_key(group_key(BlockHash(bytes.fromhex(digest)), GroupId(group)))
        yield f"unpacked[{index}]", [digest, group], [unpacked[0].hex(), unpacked[1]]


def _group_keys(recorded: dict[str, list[str]], hashes: list[BlockHash]) -> Pairs:
    for group, keys in recorded.items():
        got = [group_key(block_hash, GroupId(int(group))).hex() for block_hash in hashes]
        yield f"group_keys[{group}]", keys, got


_CHECKS: dict[str, Callable[[Row, BlockHasher], Pairs]] = {
    "chain": _chain,
    "lookahead": _chain,
    "incremental": _incremental,
    "incremental_lookahead": _incremental,
    "serialization": _serialization,
    "coarse_view": _coarse_view,
    "external": _external,
}

HASH_KINDS = (*_CHECKS, "typing")


def _request(row: Row) -> tuple[HashInputs, list[int]]:
    """The recorded request, and its token ids (zeros for a prompt of embeddings alone)."""
    request = row["request"]
    lora, embeds = request.get("lora"), request.get("prompt_embeds")
    mask = request.get("prompt_is_token_ids")
    inputs = HashInputs(
        lora=LoraAdapter(**lora) if lora else None,
        mm=tuple(MmItem(**item) for item in request.get("mm") or ()),
        cache_salt=request.get("cache_salt"),
        prompt_embeds=None
        if embeds is None
        else PromptEmbeds(
            dtype=embeds["dtype"],
            shape=tuple(embeds["shape"]),
            data=bytes.fromhex(embeds["data"]),
            is_token_ids=None if mask is None else tuple(map(bool, mask)),
        ),
        same_identifier_object=row.get("same_identifier_object", False),
    )
    token_ids = request["token_ids"]
    if token_ids is None:
        assert inputs.prompt_embeds is not None, "neither token_ids nor prompt_embeds"
        token_ids = [0] * inputs.prompt_embeds.num_rows
    return inputs, token_ids


def _hex(hashes: Any) -> list[str]:
    return [block_hash.hex() for block_hash in hashes]


def _json(value: object) -> object:
    """As the recordings write it: lists for tuples, {"bytes": hex} for bytes."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value


def _check_typing(row: Row) -> Outcome:
    """What other Python types at the same places do to the digest."""
    algorithm = HashAlgorithm(row["algo"])
    parent = bytes.fromhex(row["parent"])
    try:
        value = _Expression(parent, row["X"]).value(row["value"])
    except ImportError as error:
        return Outcome(skipped=str(error))
    got, raised = None, None
    with _names_in_main_module(_MAIN_CLASSES):
        try:
            got = digest_value(algorithm, value).hex()
        except Exception as error:
            raised = type(error).__name__
    reference = digest_value(algorithm, (parent, (1, 2, 3), None)).hex()
    pairs = [
        ("error", row["error"], raised),
        ("hash", row["hash"], got),
        ("same_as_reference", row["same_as_reference"], got == reference),
    ]
    return first_difference(f"typing {row['value']}", pairs)


class _MyInt(int):
    pass


class _Color(enum.IntEnum):
    ONE = 1


# Pickle writes a class by module and name, and the recorded ones stood in a main module.
_MAIN_CLASSES = {"MyInt": _MyInt, "Color": _Color}
for _name, _class in _MAIN_CLASSES.items():
    _class.__module__, _class.__qualname__, _class.__name__ = "__main__", _name, _name


@contextmanager
def _names_in_main_module(names: dict[str, type]) -> Iterator[None]:
    main = sys.modules["__main__"].__dict__
    before = {name: main[name] for name in names if name in main}
    main.update(names)
    try:
        yield
    finally:
        for name in names:
            del main[name]
        main.update(before)


_CONSTRUCTORS: dict[str, Callable[..., object]] = {
    "MyInt": _MyInt,
    "bool": bool,
    "bytearray": bytearray,
    "bytes": bytes,
    "float": float,
    "int": int,
    "list": list,
    "str": str,
    "tuple": tuple,
}
_NUMPY_TYPES = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


class _Expression:
    """Evaluates the few forms that occur in `typing` lines, and nothing else.

    `X2` is equal to `X` and another object; `K` stands for the tuple that `with K = ...` gives.
    """

    def __init__(self, parent: bytes, text: str) -> None:
        self._parent = parent
        # Joined afresh, so that neither is interned and the two are different objects.
        self._names: dict[str, object] = {
            "P": parent,
            "X": "".join(list(text)),
            "X2": "".join(list(text)),
        }

    def value(self, text: str) -> object:
        expression = text.partition("  ")[0]
        expression, _, definition = expression.partition(" with ")
        if definition:
            name, _, defined = definition.partition(" = ")
            self._names[name.strip()] = self._evaluate(defined)
        return self._evaluate(expression)

    def _evaluate(self, text: str) -> object:
        return self._node(ast.parse(text.strip(), mode="eval").body)

    def _node(self, node: ast.expr) -> object:
        match node:
            case ast.Constant(value=str(text)):
                # Equal texts in source code are one object.
                return sys.intern(text)
            case ast.Constant(value=value):
                return value
            case ast.Tuple(elts=items):
                return tuple([self._node(item) for item in items])
            case ast.List(elts=items):
                return [self._node(item) for item in items]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Name(id=name) if name in self._names:
                return self._names[name]
            case ast.Attribute(value=ast.Name(id="Color"), attr="ONE"):
                return _Color.ONE
            case ast.Call(func=function, args=arguments, keywords=[]):
                return self._callable(function)(*(self._node(argument) for argument in arguments))
        raise ValueError(f"cannot evaluate {ast.unparse(node)}")

    def _callable(self, node: ast.expr) -> Callable[..., object]:
        match node:
            case ast.Name(id=name) if name in _CONSTRUCTORS:
                return _CONSTRUCTORS[name]
            case ast.Attribute(value=ast.Name(id="np"), attr=name) if name in _NUMPY_TYPES:
                return _numpy_type(name)
            case ast.Attribute(value=ast.Name(id="P"), attr="hex"):
                return self._parent.hex
            case ast.Attribute(value=ast.Constant(value=""), attr="join"):
                return "".join
        raise ValueError(f"cannot call {ast.unparse(node)}")


def _numpy_type(name: str) -> Callable[..., object]:
    try:
        import numpy
    except ImportError:
        raise ImportError("needs numpy, which is not installed here") from None
    constructor: Callable[..., object] = getattr(numpy, name)
    return constructor
