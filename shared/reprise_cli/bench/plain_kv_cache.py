"""A KV cache manager written for plainness: one object per block, one rule per method.

Two uses: the peer of `reprise bench kv-cache`, and the model that property tests hold the real
manager against. It covers full and sliding-window groups of any block sizes, dense or sparse
retention, prompt tails, and a dropped last block with one group; no external tokens, no limits.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from reprise_core.ids import BlockHash
from reprise_scheduler.kv_cache.config import GroupKind, KVCacheConfig
from reprise_scheduler.kv_cache.request import CachedRequest

Entry = tuple[BlockHash, int]
"""A block hash in a group."""

PlainEvent = tuple[str, int, tuple[BlockHash, ...]]
"""("stored" or "removed", group, hashes), or ("cleared", 0, ())."""


@dataclass(eq=False)
class PlainBlock:
    number: int
    holders: int = 0
    own: Entry | None = None
    own_tokens: int = 0
    additional: list[Entry] = field(default_factory=list)


@dataclass
class PlainTables:
    tables: list[list[PlainBlock]]
    num_cached: list[int]


class PlainKVCache:
    """Same rules as `KVCacheManager`, one block at a time."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self.blocks = [PlainBlock(number) for number in range(config.num_blocks)]
        self.null = self.blocks[0]
        self.queue: OrderedDict[int, PlainBlock] = OrderedDict((b.number, b) for b in self.blocks[1:])
        self.entries: dict[Entry, OrderedDict[int, PlainBlock]] = {}
        self.requests: dict[str, PlainTables] = {}
        self.events: list[PlainEvent] = []
        self.sizes = [config.effective_block_size(spec) for spec in config.groups]

    # --- blocks --------------------------------------------------------------------------------

    def take(self) -> PlainBlock:
        _, block = self.queue.popitem(last=False)
        return block

    def touch(self, block: PlainBlock) -> None:
        if block is not self.null:
            self.queue.pop(block.number, None)
            block.holders += 1

    def give_back(self, blocks: Iterable[PlainBlock]) -> None:
        unused = []
        for block in blocks:
            if block is self.null:
                continue
            block.holders -= 1
            if block.holders == 0:
                if block.own is None:
                    unused.append(block)
                else:
                    self.queue[block.number] = block
        for block in reversed(unused):
            self.queue[block.number] = block
            self.queue.move_to_end(block.number, last=False)

    def hold(self, block: PlainBlock, entry: Entry) -> None:
        self.entries.setdefault(entry, OrderedDict())[block.number] = block

    def unhash(self, block: PlainBlock) -> None:
        if block.own is None:
            return
        for entry in [block.own, *sorted(block.additional)]:
            del self.entries[entry][block.number]
            if not self.entries[entry]:
                del self.entries[entry]
            self.events.append(("removed", entry[1], (entry[0],)))
        block.own = None
        block.additional = []

    def find(self, entry: Entry) -> PlainBlock | None:
        holders = self.entries.get(entry)
        return next(iter(holders.values())) if holders else None

    # --- looking up ----------------------------------------------------------------------------

    def lookup(self, request: CachedRequest) -> tuple[list[list[PlainBlock]], int]:
        """The longest length that is valid in every group, tried from the longest down."""
        groups = range(len(self.sizes))
        if not self.config.enable_caching or request.skip_lookup:
            return [[] for _ in groups], 0
        unit = self.config.scheduler_block_size
        limit = len(request.token_ids) - 1
        if len(self.sizes) == 1 and self.config.groups[0].kind is GroupKind.FULL:
            return self.lookup_one_full(request, limit)
        for length in range(limit // unit * unit, 0, -unit):
            hit = [self.valid_hit(request, group, length) for group in groups]
            if all(blocks is not None for blocks in hit):
                return [blocks or [] for blocks in hit], length
        return [[] for _ in groups], 0

    def lookup_one_full(self, request: CachedRequest, limit: int) -> tuple[list[list[PlainBlock]], int]:
        blocks = []
        for place in range(limit // self.sizes[0]):
            block = self.find(self.entry(request, 0, place))
            if block is None:
                break
            blocks.append(block)
        if self.config.drops[0] and blocks:
            blocks.pop()
        return [blocks], len(blocks) * self.sizes[0]

    def valid_hit(self, request: CachedRequest, group: int, length: int) -> list[PlainBlock] | None:
        """The group's blocks up to `length`, if what later tokens read is there; null before that."""
        end = length // self.sizes[group] + self.config.drops[group]
        if end * self.sizes[group] >= len(request.token_ids):
            return None
        first = 0
        if self.config.groups[group].kind is GroupKind.SLIDING:
            first = max(0, end - self.window_blocks(group))
        found = [self.find(self.entry(request, group, place)) for place in range(first, end)]
        blocks = [block for block in found if block is not None]
        if len(blocks) < len(found):
            return None
        hit = [self.null] * first + blocks
        return hit[: length // self.sizes[group]]

    def window_blocks(self, group: int) -> int:
        window = self.config.groups[group].window or 1
        return -(-(window - 1) // self.sizes[group]) + self.config.drops[group]

    def entry(self, request: CachedRequest, group: int, place: int) -> Entry:
        per_block = self.sizes[group] // self.config.hash_block_size
        return request.block_hashes[(place + 1) * per_block - 1], group

    # --- allocating ----------------------------------------------------------------------------

    def allocate(
        self,
        request: CachedRequest,
        num_new_tokens: int,
        *,
        num_computed_tokens: int,
        hit: Sequence[Sequence[PlainBlock]] = (),
        num_hit_tokens: int = 0,
    ) -> list[list[int]] | None:
        computed = num_computed_tokens + num_hit_tokens
        state = self.requests.get(request.request_id)
        if state is not None:
            self.trim(request, computed)
        total = computed + num_new_tokens
        if self.needed(state, hit, total, computed) > len(self.queue):
            return None
        if state is None:
            state = self.adopt(request, hit, computed)
        new_blocks = []
        for group, table in enumerate(state.tables):
            fresh = [self.take() for _ in range(max(0, -(-total // self.sizes[group]) - len(table)))]
            for block in fresh:
                self.unhash(block)
                block.holders = 1
            table.extend(fresh)
            new_blocks.append([block.number for block in fresh])
        if self.config.enable_caching:
            self.cache(request, state, min(total, len(request.token_ids)))
        return new_blocks

    def needed(
        self, state: PlainTables | None, hit: Sequence[Sequence[PlainBlock]], total: int, computed: int
    ) -> int:
        needed = 0
        for group, size in enumerate(self.sizes):
            skipped = self.skipped(group, computed) // size
            adopted = hit[group] if hit else ()
            held = len(state.tables[group]) if state else 0
            needed += max(0, -(-total // size) - max(skipped, held, len(adopted)))
            needed += sum(block.number in self.queue for block in adopted[skipped:])
        return needed

    def adopt(
        self, request: CachedRequest, hit: Sequence[Sequence[PlainBlock]], computed: int
    ) -> PlainTables:
        groups = range(len(self.sizes))
        state = PlainTables([[] for _ in groups], [0] * len(groups))
        self.requests[request.request_id] = state
        if not any(hit):
            return state
        for group, table in enumerate(state.tables):
            skipped = self.skipped(group, computed) // self.sizes[group]
            table.extend([self.null] * skipped)
            for block in hit[group][skipped:]:
                self.touch(block)
                table.append(block)
            state.num_cached[group] = len(table)
        return state

    def skipped(self, group: int, num_tokens: int) -> int:
        spec = self.config.groups[group]
        if spec.kind is GroupKind.SLIDING:
            return max(0, num_tokens - (spec.window or 1) + 1 - spec.extra_retained)
        return 0

    def trim(self, request: CachedRequest, num_tokens: int) -> None:
        for group, table in enumerate(self.requests[request.request_id].tables):
            returned = []
            for place in reversed(
                range(min(self.skipped(group, num_tokens) // self.sizes[group], len(table)))
            ):
                if table[place] is self.null:
                    break
                returned.append(table[place])
                table[place] = self.null
            self.give_back(returned)

    # --- caching -------------------------------------------------------------------------------

    def cache(self, request: CachedRequest, state: PlainTables, num_tokens: int) -> None:
        for group, size in enumerate(self.sizes):
            settled = max(0, num_tokens - max(0, self.config.num_prefill_lookahead - 1))
            if len(self.sizes) > 1:
                settled = num_tokens // self.config.scheduler_block_size * self.config.scheduler_block_size
            first, end = state.num_cached[group], settled // size
            if first < end:
                self.cache_blocks(request, state.tables[group], group, range(first, end))
                state.num_cached[group] = end
            if self.config.groups[group].kind is GroupKind.FULL and size > self.config.hash_block_size:
                self.cache_tail(request, state.tables[group], group, settled)

    def cache_blocks(
        self, request: CachedRequest, table: Sequence[PlainBlock], group: int, places: range
    ) -> None:
        stored = []
        for place in places:
            block = table[place]
            if block is self.null or not self.keeps(request, group, place):
                continue
            self.unhash(block)
            block.own = self.entry(request, group, place)
            block.own_tokens = (place + 1) * self.sizes[group]
            self.hold(block, block.own)
            stored.append(block.own[0])
        self.events.append(("stored", group, tuple(stored)))

    def keeps(self, request: CachedRequest, group: int, place: int) -> bool:
        """Whether the block is in the window of a hit's end that matters."""
        if self.config.groups[group].kind is not GroupKind.SLIDING:
            return True
        unit = self.config.scheduler_block_size
        interval = self.config.retention_interval
        segment = unit if interval is None else interval
        shift = int(self.config.drops[group])
        ends: list[int] = []
        if segment:
            ends += range(
                segment, (place + self.window_blocks(group) + 2) * self.sizes[group] + segment, segment
            )
        if interval is not None:
            last = len(request.token_ids[: request.num_prompt_tokens])
            if any(self.config.drops):
                ends += [max(0, (last - 1) // unit * unit - unit), max(0, last // unit * unit - unit)]
            else:
                ends.append((last - 1) // unit * unit)
            if request.junction_tokens:
                ends.append(request.junction_tokens // unit * unit)
        window = self.window_blocks(group)
        if segment and window >= segment // self.sizes[group]:
            return True
        return any(0 <= end // self.sizes[group] + shift - 1 - place < window for end in ends)

    def cache_tail(
        self, request: CachedRequest, table: Sequence[PlainBlock], group: int, settled: int
    ) -> None:
        end = request.num_prompt_tokens - (0 if self.config.drops[group] else 1)
        end -= end % self.config.hash_block_size
        place = end // self.sizes[group]
        if end <= 0 or end > settled or end % self.sizes[group] == 0 or place >= len(table):
            return
        block = table[place]
        entry = (request.block_hashes[end // self.config.hash_block_size - 1], group)
        if block.own is not None and block.own_tokens < end:
            self.unhash(block)
        if block.own is None:
            block.own, block.own_tokens = entry, end
        elif entry == block.own or entry in block.additional:
            return
        else:
            block.additional.append(entry)
        self.hold(block, entry)
        self.events.append(("stored", group, (entry[0],)))

    # --- giving back ---------------------------------------------------------------------------

    def free(self, request: CachedRequest) -> None:
        for table in self.requests.pop(request.request_id).tables:
            self.give_back(reversed(table))

    def pop_blocks(self, request: CachedRequest) -> list[PlainBlock]:
        tables = self.requests.pop(request.request_id).tables
        return [block for table in tables for block in table if block is not self.null]

    def evict(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.unhash(self.blocks[number])

    def reset(self) -> bool:
        if len(self.queue) < len(self.blocks) - 1:
            return False
        for block in self.blocks:
            block.own = None
            block.additional = []
        self.entries = {}
        self.events.append(("cleared", 0, ()))
        return True
