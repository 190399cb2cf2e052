"""Extra keys: what besides its tokens tells one block from another.

Hashed keys are tagged tuples in a fixed order: adapter, multimodal items, salt, prompt embeddings.
The tags keep an adapter's name from being taken for another caller's salt. Events carry the same
keys untagged and without the adapter's path.

Pickle writes a str object that occurs twice only once. So this module makes every str that it puts
into a key itself, one object per use: a hash never depends on whether the caller's strings were
interned or shared. The tags are one object each. One-character Latin-1 strings and the empty string
are singletons of the interpreter and are referenced when they repeat, here as in the reference.
"""

from dataclasses import dataclass, field
from hashlib import sha256

from reprise_core.errors import InvalidInput

LORA_TAG = "lora"
MM_TAG = "mm"
SALT_TAG = "cache_salt"
EMBEDS_TAG = "prompt_embeds"

ExtraKey = tuple[str, str, str] | tuple[str, str, int] | tuple[str, str] | tuple[str, bytes]
"""A tagged key: ("lora", name, path), ("mm", identifier, offset in block), ("cache_salt", salt),
("prompt_embeds", digest)."""

ExtraKeys = tuple[ExtraKey, ...]

EventExtraKey = str | bytes | tuple[str, int]
"""An untagged key: adapter name, (identifier, offset in block), salt, digest."""

EventExtraKeys = tuple[EventExtraKey, ...]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """`int_id` is local to an engine and is not hashed; `path` is.

    `digest` names the content, in hexadecimal digits; it is not hashed either, and tells apart what is
    outside of an engine. Empty = not known.
    """

    name: str
    int_id: int
    path: str
    digest: str = ""

    def __post_init__(self) -> None:
        _check_text("lora.name", self.name)
        _check_text("lora.path", self.path)


@dataclass(frozen=True, slots=True)
class MmItem:
    """Placeholder tokens [offset, offset + length) of an image, sound or video.

    `identifier` is the digest of its content.
    """

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        _check_text("mm.identifier", self.identifier)
        _check_count("mm.offset", self.offset)
        _check_count("mm.length", self.length)

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Embedding rows that stand in for prompt tokens.

    `data` is the row-major little-endian tensor, shape[0] rows. In a mixed prompt
    `is_token_ids[i]` is false where an embedding stands at position i. Where one stands, the token
    id is hashed as 0.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)
    is_token_ids: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shape or self.shape[0] < 1:
            raise InvalidInput("prompt_embeds.shape", f"{self.shape} has no rows")
        if len(self.data) % self.shape[0]:
            raise InvalidInput(
                "prompt_embeds.data",
                f"{len(self.data)} bytes do not divide into {self.shape[0]} rows",
            )

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    def digest(self, start: int, end: int) -> bytes:
        """SHA-256 of the rows in [start, end) that exist; of nothing past the last row."""
        row_nbytes = len(self.data) // self.num_rows
        return sha256(memoryview(self.data)[start * row_nbytes : end * row_nbytes]).digest()

    def zeroed(self, token_ids: list[int], first: int) -> list[int]:
        """Token ids at positions from `first` on, with 0 where an embedding stands."""
        if self.is_token_ids is None:
            return token_ids
        mask = self.is_token_ids[first : first + len(token_ids)]
        head = [token if is_token else 0 for token, is_token in zip(token_ids, mask, strict=False)]
        return head + token_ids[len(mask) :]


@dataclass(frozen=True, slots=True)
class HashInputs:
    """Everything of a request that goes into its block hashes, except its tokens.

    `mm` is sorted by offset. An empty `cache_salt` counts as none.
    `same_identifier_object` lets equal identifiers in `mm` be one str object, as in an engine that
    made them so; it changes pickle hashes only.
    """

    lora: LoraAdapter | None = None
    mm: tuple[MmItem, ...] = ()
    cache_salt: str | None = None
    prompt_embeds: PromptEmbeds | None = None
    same_identifier_object: bool = False

    def __post_init__(self) -> None:
        if self.cache_salt is not None:
            _check_text("cache_salt", self.cache_salt)
        for before, item in zip(self.mm, self.mm[1:], strict=False):
            if item.offset < before.offset:
                raise InvalidInput(
                    "mm", f"item at {item.offset} stands behind one at {before.offset}, must be sorted"
                )

    @property
    def is_plain(self) -> bool:
        """No block of this request has extra keys."""
        return not (self.lora or self.mm or self.cache_salt or self.prompt_embeds)


class BlockKeys:
    """The extra keys of one request's blocks, asked for in ascending order.

    `end` of `hashed` is the block's end plus the look-ahead, which belongs to the block here.
    """

    def __init__(self, inputs: HashInputs) -> None:
        lora, salt = inputs.lora, inputs.cache_salt
        self._lora: ExtraKeys = () if lora is None else ((LORA_TAG, _fresh(lora.name), _fresh(lora.path)),)
        self._salt: ExtraKeys = ((SALT_TAG, _fresh(salt)),) if salt else ()
        self._mm = inputs.mm
        self._identifiers = _identifiers(inputs)
        self._first_mm = 0
        self._embeds = inputs.prompt_embeds
        self._constant = self._lora or None

    def hashed(self, start: int, end: int) -> ExtraKeys | None:
        """Tagged keys of the block that begins at token `start`, or None."""
        mm = self._overlapping(start, end)
        if not mm and self._embeds is None and (start or not self._salt):
            return self._constant
        salt = self._salt if start == 0 else ()
        embeds: ExtraKeys = ()
        if self._embeds is not None:
            embeds = ((EMBEDS_TAG, self._embeds.digest(start, end)),)
        return (*self._lora, *mm, *salt, *embeds)

    def _overlapping(self, start: int, end: int) -> ExtraKeys:
        """Items that reach into [start, end), in order."""
        items = self._mm
        while self._first_mm < len(items) and items[self._first_mm].end <= start:
            self._first_mm += 1
        keys: list[ExtraKey] = []
        for index in range(self._first_mm, len(items)):
            item = items[index]
            if item.offset >= end:
                break
            if item.end > start:
                keys.append((MM_TAG, self._identifiers[index], item.offset - start))
        return tuple(keys)


def hashed_extra_keys(
    inputs: HashInputs, *, block_size: int, first_block: int, num_blocks: int, lookahead: int = 0
) -> list[ExtraKeys | None]:
    """The tagged keys of `num_blocks` blocks, as they are hashed."""
    if inputs.is_plain:
        return [None] * num_blocks
    keys = BlockKeys(inputs)
    starts = range(first_block * block_size, (first_block + num_blocks) * block_size, block_size)
    return [keys.hashed(start, start + block_size + lookahead) for start in starts]


def event_extra_keys(
    inputs: HashInputs, *, block_size: int, first_block: int, num_blocks: int, lookahead: int = 0
) -> tuple[EventExtraKeys | None, ...] | None:
    """The untagged keys of `num_blocks` blocks, as events carry them; None when no block has any."""
    if inputs.is_plain:
        return None
    tagged = hashed_extra_keys(
        inputs,
        block_size=block_size,
        first_block=first_block,
        num_blocks=num_blocks,
        lookahead=lookahead,
    )
    if not any(tagged):
        return None
    return tuple(None if keys is None else untagged(keys) for keys in tagged)


def untagged(keys: ExtraKeys) -> EventExtraKeys:
    return tuple(_untagged_key(key) for key in keys)


def _untagged_key(key: ExtraKey) -> EventExtraKey:
    match key:
        case ("lora", str(name), _):
            return name
        case ("mm", str(identifier), int(offset)):
            return identifier, offset
        case (_, str() | bytes() as value):
            return value
    raise AssertionError(f"no such extra key: {key[0]}")


def _identifiers(inputs: HashInputs) -> list[str]:
    """One str object per item, or one per distinct text when the inputs say so."""
    if not inputs.same_identifier_object:
        return [_fresh(item.identifier) for item in inputs.mm]
    shared = {item.identifier: _fresh(item.identifier) for item in inputs.mm}
    return [shared[item.identifier] for item in inputs.mm]


def _fresh(text: str) -> str:
    """An equal str object that nobody else holds (singletons excepted)."""
    return text.encode().decode()


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidInput(name, f"{type(value).__name__}, must be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(name, "holds a lone surrogate, must be valid Unicode") from None


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise InvalidInput(name, f"{value!r}, must be a whole number of at least 0")
