"""Eviction by tenants' shares: who has more than its share loses first, the rest is least recent."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from reprise_core.errors import InvalidInput
from reprise_core.ids import BlockHash, BlockId, GroupId
from reprise_scheduler.kv_cache.eviction import EvictionPolicy
from reprise_scheduler.kv_cache.group import Group
from reprise_scheduler.kv_cache.request import CachedRequest

MAX_TENANTS = 64
"""Tenants without a share of their own that are told apart; the blocks of further ones count as one
tenant's, named `OTHERS`."""

OTHERS = "*"


class TenantShares(EvictionPolicy):
    """A share is a part of the pool, 0 to 1, that a tenant's cached blocks may fill before they are
    the first to go. It reserves nothing: what nobody else needs, anyone may use.

    A block belongs to the tenant that filled it. Taking one block costs a look at each tenant.
    """

    def __init__(
        self, num_blocks: int, shares: Mapping[str, float] | None = None, default_share: float = 1.0
    ) -> None:
        for name, share in {**(shares or {}), "default": default_share}.items():
            if not 0.0 <= share <= 1.0:
                raise InvalidInput(f"tenant share {name}", f"{share} is not in [0, 1]")
        self._limits = {tenant: share * num_blocks for tenant, share in (shares or {}).items()}
        self._default_limit = default_share * num_blocks
        self._owner: dict[BlockId, str] = {}
        self._num_cached: dict[str, int] = {}
        # Members per tenant, the least recent first, with the time of their return.
        self._members: dict[str, OrderedDict[BlockId, int]] = {}
        self._tenant_of: dict[BlockId, str] = {}
        self._clock = 0

    def entered(
        self, request: CachedRequest, group: Group, places: Sequence[int], block_ids: Sequence[BlockId]
    ) -> None:
        tenant = request.tenant
        known = tenant in self._num_cached or tenant in self._limits
        if not known and len(self._num_cached) >= MAX_TENANTS:
            tenant = OTHERS
        self._num_cached[tenant] = self._num_cached.get(tenant, 0) + len(block_ids)
        for block_id in block_ids:
            self._owner[block_id] = tenant

    def removed(self, block_id: BlockId, block_hash: BlockHash, group_id: GroupId) -> None:
        tenant = self._owner.pop(block_id, None)
        if tenant is not None:
            self._num_cached[tenant] -= 1
            if not self._num_cached[tenant]:
                del self._num_cached[tenant]

    def clearing(self, entries: Sequence[tuple[BlockHash, GroupId]]) -> None:
        self._owner.clear()
        self._num_cached.clear()

    def add(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            tenant = self._owner.get(block_id, "")
            self._clock += 1
            self._tenant_of[block_id] = tenant
            self._members.setdefault(tenant, OrderedDict())[block_id] = self._clock

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            self._leave(block_id)

    def pop(self, num_blocks: int) -> list[BlockId]:
        """Counts the victims as gone while it goes on, though their entries go only afterwards."""
        gone: dict[str, int] = {}
        victims = []
        for _ in range(num_blocks):
            tenant = max(self._members, key=lambda name: self._urgency(name, gone.get(name, 0)))
            block_id = next(iter(self._members[tenant]))
            if block_id in self._owner:
                gone[tenant] = gone.get(tenant, 0) + 1
            self._leave(block_id)
            victims.append(block_id)
        return victims

    def _urgency(self, tenant: str, num_gone: int) -> tuple[float, int]:
        """By how much the tenant is over its share; then whose least recent block is the oldest."""
        limit = self._limits.get(tenant, self._default_limit)
        over = self._num_cached.get(tenant, 0) - num_gone - limit
        _, returned_at = next(iter(self._members[tenant].items()))
        return max(over, 0.0), -returned_at

    def _leave(self, block_id: BlockId) -> None:
        tenant = self._tenant_of.pop(block_id)
        members = self._members[tenant]
        del members[block_id]
        if not members:
            del self._members[tenant]

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __iter__(self) -> Iterator[BlockId]:
        """By age alone: which tenant is over its share changes while victims go."""
        stamped = (item for members in self._members.values() for item in members.items())
        for block_id, _ in sorted(stamped, key=lambda item: item[1]):
            yield block_id
