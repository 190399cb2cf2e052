"""What a KV cache is made of: the groups, their block sizes, and the limits used in counting."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from reprise_core.errors import InvalidInput
from reprise_core.ids import BlockId

NULL_BLOCK = BlockId(0)
"""Block 0 fills table places that need no memory; it is never taken, counted or hashed."""


class GroupKind(StrEnum):
    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Layers that share one block table. Sizes in tokens."""

    kind: GroupKind = GroupKind.FULL
    block_size: int = 16
    window: int | None = None
    """Sliding only: a token attends to itself and to window - 1 tokens before it."""
    extra_retained: int = 0
    """Sliding only: tokens kept before the window, for draft heads that look back."""
    chunk: int | None = None
    """Chunked only: a token attends within its own chunk of this many tokens."""
    eagle: bool = False
    """A draft group: its last matched block is dropped, so that the draft head has hidden states."""
    dcp_sharded: bool = True
    """Whether decode context parallelism spreads a block over the ranks, or each rank has it all."""

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        _at_least("extra_retained", self.extra_retained, 0)
        _only_for(self.kind, GroupKind.SLIDING, "window", self.window)
        _only_for(self.kind, GroupKind.CHUNKED, "chunk", self.chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """One pool of blocks and the groups that draw from it. The defaults are one full group."""

    num_blocks: int
    """The null block included."""
    groups: Sequence[GroupSpec] = field(default_factory=lambda: (GroupSpec(),))
    hash_block_size: int = 0
    """Tokens per block hash; 0 = the greatest size that divides every group's."""
    scheduler_block_size: int = 0
    """Hits over several groups are multiples of this; 0 = the least common multiple of the sizes."""
    max_model_len: int = 1 << 31
    max_in_flight_tokens: int = 1 << 31
    """The most tokens of one request that can be computed and not yet be trimmed."""
    enable_caching: bool = True
    watermark: float = 0.0
    """Share of the pool that some admissions leave free."""
    retention_interval: int | None = None
    """None keeps every window (dense); 0 only those at the prompt's end; else also one per interval."""
    use_eagle: bool = False
    num_prefill_lookahead: int = 0
    """Prompt tokens that a draft head reads ahead of the position it works at."""
    dcp_world_size: int = 1
    track_misses: bool = False
    """Remember evictions and namespaces, so that `explain_miss` can say why a hit ended."""
    verify_tokens: bool = False
    """Keep each cached block's tokens and compare them on a hit."""
    full_prompt_hit: bool = False
    """Let a prompt whose blocks are all cached compute one token: its last block is copied."""
    max_pinned_blocks: int = 0
    """The most unlike blocks that pins may hold; 0 refuses every pin."""
    drops: tuple[bool, ...] = field(init=False)
    """Per group, whether the draft-head rule drops its last matched block."""

    def __post_init__(self) -> None:
        _at_least("num_blocks", self.num_blocks, 2)
        _at_least("max_model_len", self.max_model_len, 1)
        _at_least("max_in_flight_tokens", self.max_in_flight_tokens, 1)
        _at_least("dcp_world_size", self.dcp_world_size, 1)
        _at_least("num_prefill_lookahead", self.num_prefill_lookahead, 0)
        _at_least("max_pinned_blocks", self.max_pinned_blocks, 0)
        if not 0.0 <= self.watermark < 1.0:
            raise InvalidInput("watermark", f"{self.watermark} is not in [0, 1)")
        if not 1 <= len(self.groups) <= 255:
            raise InvalidInput("groups", f"{len(self.groups)} groups; 1 to 255 are allowed")
        sizes = [self.effective_block_size(spec) for spec in self.groups]
        _settle(self, "groups", tuple(self.groups))
        _settle(self, "hash_block_size", self.hash_block_size or math.gcd(*sizes))
        _settle(self, "scheduler_block_size", self.scheduler_block_size or math.lcm(*sizes))
        self._check_sizes(sizes)
        flagged = tuple(spec.eagle for spec in self.groups)
        every = self.use_eagle and not any(flagged)
        _settle(self, "drops", (True,) * len(flagged) if every else flagged)

    def effective_block_size(self, spec: GroupSpec) -> int:
        """Tokens that one block id stands for, over all context-parallel ranks."""
        return spec.block_size * self.dcp_world_size if spec.dcp_sharded else spec.block_size

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            if size % self.hash_block_size:
                raise InvalidInput(
                    "hash_block_size", f"{self.hash_block_size} does not divide block size {size}"
                )
            if self.scheduler_block_size % size:
                raise InvalidInput(
                    "scheduler_block_size", f"{self.scheduler_block_size} is no multiple of block size {size}"
                )
        interval = self.retention_interval
        if interval is not None and (interval < 0 or interval % self.scheduler_block_size):
            raise InvalidInput(
                "retention_interval",
                f"{interval} must be 0 or a multiple of the scheduler block size {self.scheduler_block_size}",
            )


def _settle(config: KVCacheConfig, name: str, value: object) -> None:
    object.__setattr__(config, name, value)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidInput(name, f"{value} is below {least}")


def _only_for(kind: GroupKind, wants: GroupKind, name: str, value: int | None) -> None:
    if kind is not wants:
        if value is not None:
            raise InvalidInput(name, f"only {wants} groups have one, not {kind}")
    elif value is None or value < 1:
        raise InvalidInput(name, f"{wants} groups need one of at least 1, not {value}")
