"""What the cache manager reads of a request, and what it keeps for one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from reprise_core.extra_keys import LoraAdapter
from reprise_core.ids import BlockHash, BlockId, GroupId, RequestId


class CachedRequest(Protocol):
    """Implemented by the scheduler's request. Prompt and output only ever grow at the end."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and output so far; no draft tokens."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """One per full hash block of `token_ids`."""

    @property
    def skip_lookup(self) -> bool:
        """The request needs every prompt position computed; its blocks are cached all the same."""

    @property
    def report_full(self) -> bool:
        """A hit is announced again as stored, from block 0 on."""

    @property
    def num_preemptions(self) -> int: ...

    @property
    def lora(self) -> LoraAdapter | None: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def tenant(self) -> str:
        """On whose behalf; empty without tenants."""

    junction_tokens: int
    """Set by every look-up: the longest prefix that some groups have but not all, 0 if none."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks at the start of a request.

    Invariants: num_tokens is below the request's length, so that its last token is computed and
    gives logits. Per group, the blocks from which later tokens read are cached ones; those that have
    left a window may be null. Holds nothing: the blocks may be taken until the hit is allocated.
    """

    blocks: tuple[tuple[BlockId, ...], ...]
    num_tokens: int
    junction: int = 0
    copy_sources: tuple[BlockId, ...] = ()
    """Only with `full_prompt_hit`: per group the block of the prompt's last tokens, which is not
    adopted but copied; num_tokens is then the prompt's length less 1."""


class BlockCopy(NamedTuple):
    """Copy a whole block before this step computes anything."""

    group_id: GroupId
    source: BlockId
    target: BlockId


class RequestBlocks:
    """Block tables of one request, one per group, and how many blocks of each count as cached.

    Up to `capacity` tokens no table grows, below `next_cache` known tokens nothing new can be cached,
    and below `next_trim` computed tokens no further block leaves a window.
    """

    __slots__ = ("capacity", "next_cache", "next_trim", "num_cached", "tables")

    def __init__(self, num_groups: int) -> None:
        self.tables: list[list[BlockId]] = [[] for _ in range(num_groups)]
        self.num_cached = [0] * num_groups
        self.capacity = self.next_cache = self.next_trim = 0
