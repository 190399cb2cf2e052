"""One group's arithmetic: which blocks a request needs and which have left its window."""

from bisect import bisect_right
from collections.abc import Sequence

from reprise_core.ids import GroupId
from reprise_scheduler.kv_cache.config import GroupKind, GroupSpec, KVCacheConfig

NEVER = 1 << 62
"""More tokens than any request has."""


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


class Group:
    """A group's spec with what follows from it. Sizes in tokens unless the name says blocks."""

    __slots__ = (
        "block_size",
        "chunk",
        "drops",
        "hash_block_size",
        "hashes_per_block",
        "id",
        "kind",
        "max_admission_blocks",
        "run_blocks",
        "spec",
        "window",
        "window_retained",
    )

    def __init__(self, group_id: GroupId, spec: GroupSpec, config: KVCacheConfig) -> None:
        self.id = group_id
        self.spec = spec
        self.kind = spec.kind
        self.block_size = config.effective_block_size(spec)
        self.hash_block_size = config.hash_block_size
        self.hashes_per_block = self.block_size // config.hash_block_size
        self.drops = config.drops[group_id]
        self.window = spec.window
        self.chunk = spec.chunk or 0
        # Tokens at or after this distance before the next one are still read.
        self.window_retained = (spec.window or 0) - 1 + spec.extra_retained
        # Sliding: as many blocks in a row make a hit valid.
        self.run_blocks = ceil_div((spec.window or 1) - 1, self.block_size) + self.drops
        self.max_admission_blocks = self._max_admission_blocks(config.max_in_flight_tokens)

    def skipped_tokens(self, num_computed: int) -> int:
        """Tokens from the start that no token from `num_computed` on attends to."""
        if self.kind is GroupKind.SLIDING:
            return max(0, num_computed - self.window_retained)
        if self.kind is GroupKind.CHUNKED:
            return num_computed // self.chunk * self.chunk
        return 0

    def next_skip(self, num_computed: int) -> int:
        """With how many tokens computed one block more than now is skipped; never = a huge number."""
        if self.kind is GroupKind.FULL:
            return NEVER
        if self.kind is GroupKind.CHUNKED:
            return (num_computed // self.chunk + 1) * self.chunk
        skipped = self.skipped_tokens(num_computed) // self.block_size
        return (skipped + 1) * self.block_size + self.window_retained

    def _max_admission_blocks(self, max_in_flight: int) -> int | None:
        """The most blocks one request can hold at once; None if its length alone decides."""
        if self.kind is GroupKind.SLIDING:
            return ceil_div(self.window_retained + max_in_flight, self.block_size) + 1
        if self.kind is GroupKind.CHUNKED:
            return ceil_div(self.chunk + max_in_flight, self.block_size)
        return None


def most_tokens(groups: Sequence[Group], num_blocks: int, *, limit_tokens: int) -> int:
    """The longest sequence, at most `limit_tokens`, that one request can hold in so many blocks whichever
    way it was computed."""

    def held(group: Group, num_tokens: int) -> int:
        length = ceil_div(num_tokens, group.block_size)
        if group.max_admission_blocks is None:
            return length
        # One more where a chunk begins inside a block, and one for a block that is copied.
        return min(length, group.max_admission_blocks + 2)

    def needed(num_tokens: int) -> int:
        return sum(held(group, num_tokens) for group in groups)

    return bisect_right(range(limit_tokens + 1), num_blocks, key=needed) - 1
