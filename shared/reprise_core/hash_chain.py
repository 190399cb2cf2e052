"""Block hashes of one request, made once and extended as tokens come.

hash of block i = digest of (hash of block i - 1, its token ids, its extra keys); the parent of block 0
is NONE_HASH. Only full blocks are hashed, and with a look-ahead of L only those whose L following
tokens are known.
"""

from collections.abc import Sequence

from reprise_core.block_encoding import BlockEncoder, HashedExtra, checked_token_ids
from reprise_core.errors import InvalidInput
from reprise_core.extra_keys import BlockKeys, HashInputs
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.ids import BlockHash
from reprise_core.native_encoding import Encoding, make_encoder

_PLAIN_INPUTS = HashInputs()


class BlockHasher:
    """Makes chains of one hash profile; safe to share, it keeps nothing of any request."""

    def __init__(
        self,
        *,
        algorithm: HashAlgorithm,
        block_size: int,
        none_hash: BlockHash,
        lookahead: int = 0,
        encoding: Encoding = Encoding.AUTO,
    ) -> None:
        """`lookahead` is in tokens. `encoding` changes the speed and nothing else."""
        if type(block_size) is not int or block_size < 1:
            raise InvalidInput("block_size", f"{block_size!r}, must be at least 1 token")
        if type(lookahead) is not int or lookahead < 0:
            raise InvalidInput("lookahead", f"{lookahead!r}, must be at least 0 tokens")
        if len(none_hash) != algorithm.digest_nbytes:
            raise InvalidInput(
                "none_hash",
                f"{len(none_hash)} bytes, {algorithm} digests have {algorithm.digest_nbytes}",
            )
        self.algorithm = algorithm
        self.block_size = block_size
        self.none_hash = none_hash
        self.lookahead = lookahead
        self._encoder = make_encoder(algorithm, block_size, encoding)

    def chain(self, inputs: HashInputs = _PLAIN_INPUTS) -> "HashChain":
        """An empty chain; append the prompt to it."""
        return HashChain(self, self._encoder, inputs)

    def resume(
        self,
        token_ids: Sequence[int],
        block_hashes: Sequence[BlockHash],
        inputs: HashInputs = _PLAIN_INPUTS,
    ) -> "HashChain":
        """A chain whose first hashes were made elsewhere, from the same tokens and inputs.

        They are trusted. Full blocks past them are hashed here.
        """
        num_full = max(0, len(token_ids) - self.lookahead) // self.block_size
        if len(block_hashes) > num_full:
            raise InvalidInput(
                "block_hashes", f"{len(block_hashes)} hashes, {len(token_ids)} tokens fill {num_full} blocks"
            )
        for index, block_hash in enumerate(block_hashes):
            if len(block_hash) != self.algorithm.digest_nbytes:
                raise InvalidInput(
                    f"block_hashes[{index}]",
                    f"{len(block_hash)} bytes, {self.algorithm} digests have {self.algorithm.digest_nbytes}",
                )
        chain = HashChain(self, self._encoder, inputs)
        chain.hashes.extend(block_hashes)
        chain.num_tokens = len(block_hashes) * self.block_size
        chain.append(token_ids[chain.num_tokens :])
        return chain


class HashChain:
    """The hashes of one request's blocks.

    Invariants: len(hashes) == max(0, num_tokens - lookahead) // block_size. A refused append leaves
    the chain as it was. The cost of an append depends on the new tokens alone.
    """

    __slots__ = (
        "_block_size",
        "_embeds",
        "_encoder",
        "_keys",
        "_lookahead",
        "_missing",
        "_none_hash",
        "_pending",
        "_takes_unchecked",
        "hashes",
        "num_tokens",
    )

    def __init__(self, hasher: BlockHasher, encoder: BlockEncoder, inputs: HashInputs) -> None:
        self._encoder = encoder
        self._block_size = hasher.block_size
        self._lookahead = hasher.lookahead
        self._none_hash = hasher.none_hash
        self._embeds = inputs.prompt_embeds
        self._keys = None if inputs.is_plain else BlockKeys(inputs)
        # With a look-ahead, token ids go into the keys too, which no encoder checks.
        self._takes_unchecked = not self._lookahead and self._embeds is None
        # Every full block's hash so far. Others read it only.
        self.hashes: list[BlockHash] = []
        self.num_tokens = 0
        # The tokens after the last hashed block, and how many more it takes to hash the next (>= 1).
        self._pending: list[int] = []
        self._missing = hasher.block_size + hasher.lookahead

    def append(self, token_ids: Sequence[int], *, trusted: bool = False) -> list[BlockHash]:
        """Take more tokens of the request; returns the hashes of the blocks they completed.

        Bad token ids are refused with InvalidInput. `trusted` ids are plain non-negative ints by
        construction (from a tokenizer, or a uint32 field of a message) and are not looked at again.
        """
        if self._missing > 1 and self._embeds is None and _is_one_plain_id(token_ids):
            # A generated token that fills no block: by far the most frequent call.
            self._pending.append(token_ids[0])
            self._missing -= 1
            self.num_tokens += 1
            return []
        if trusted:
            new = token_ids if type(token_ids) is list else list(token_ids)
        else:
            if self._takes_unchecked and not self._pending and type(token_ids) is list:
                num_hashed = len(token_ids) // self._block_size * self._block_size
                if num_hashed:
                    return self._append_unchecked(token_ids, num_hashed)
            new = checked_token_ids(token_ids)
        if self._embeds is not None:
            new = self._embeds.zeroed(new, self.num_tokens)
        if len(new) >= self._missing:
            return self._append_blocks(new)
        self._pending += new
        self._missing -= len(new)
        self.num_tokens += len(new)
        return []

    def _append_unchecked(self, token_ids: list[int], num_hashed: int) -> list[BlockHash]:
        """A whole prompt: the encoder checks as it goes; only what it does not see is checked here."""
        try:
            rest = checked_token_ids(token_ids[num_hashed:])
        except InvalidInput:
            checked_token_ids(token_ids)
            raise
        new_hashes = self._append_blocks(token_ids, checked=False)
        self._pending = rest
        return new_hashes

    def _append_blocks(self, new: list[int], *, checked: bool = True) -> list[BlockHash]:
        pending = self._pending + new if self._pending else new
        num_blocks = (len(pending) - self._lookahead) // self._block_size
        parent = self.hashes[-1] if self.hashes else self._none_hash
        extras = self._extras(pending, num_blocks)
        new_hashes = self._encoder.hash_blocks(parent, pending, num_blocks, extras, checked=checked)
        self.hashes += new_hashes
        self._pending = pending[num_blocks * self._block_size :]
        self._missing = self._block_size + self._lookahead - len(self._pending)
        self.num_tokens += len(new)
        return new_hashes

    def _extras(self, pending: list[int], num_blocks: int) -> list[HashedExtra] | None:
        """The third member of each new block's tuple; None when all of them are None."""
        size, lookahead = self._block_size, self._lookahead
        if self._keys is None and not lookahead:
            return None
        first = len(self.hashes) * size
        extras: list[HashedExtra] = []
        for start in range(0, num_blocks * size, size):
            end = start + size
            keys = None
            if self._keys is not None:
                keys = self._keys.hashed(first + start, first + end + lookahead)
            extras.append((keys, *pending[end : end + lookahead]) if lookahead else keys)
        return extras


def _is_one_plain_id(token_ids: Sequence[int]) -> bool:
    if type(token_ids) is not tuple and type(token_ids) is not list:
        return False
    return len(token_ids) == 1 and type(token_ids[0]) is int and token_ids[0] >= 0


def coarse_view(block_hashes: Sequence[BlockHash], factor: int) -> Sequence[BlockHash]:
    """The same chain in blocks `factor` times as large: the fine hash at each coarse block's end."""
    return block_hashes[factor - 1 :: factor]
