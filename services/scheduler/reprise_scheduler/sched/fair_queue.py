"""Waiting requests of several tenants, each served by its weight.

Each tenant has a virtual time: the tokens planned for it, divided by its weight. Of the tenants that
wait, the one with the least virtual time is served next; within a tenant the policy's order holds. A
tenant that had nothing to do gets no credit for that: it starts at the time of whoever was served
last. No tenant starves, for the time of every other one grows with each token it is given.
"""

import heapq
from collections.abc import Iterator, Mapping

from reprise_scheduler.sched.config import SchedulingPolicy
from reprise_scheduler.sched.queues import WaitingQueue
from reprise_scheduler.sched.request import Request

DEFAULT_WEIGHT = 1.0
MAX_REMEMBERED_TENANTS = 4096
"""Beyond it those that do not wait are forgotten, the least served first: they start anew."""


class FairQueue:
    """Like WaitingQueue, which it has one of per tenant. O(log tenants + log requests) to add and take.

    Invariants: `_tenants` has exactly one entry per tenant in `_queues`, with a time that is at most the
    tenant's; virtual times never fall; a tenant leaves `_queues` when it comes up with nothing waiting.
    """

    def __init__(self, policy: SchedulingPolicy, weights: Mapping[str, float]) -> None:
        self.by_priority = policy is SchedulingPolicy.PRIORITY
        self._policy = policy
        self._weights = weights
        self._queues: dict[str, WaitingQueue] = {}
        self._tenants: list[tuple[float, str]] = []
        self._times: dict[str, float] = {}
        self._last_time = 0.0
        """Virtual time of the tenant that was served last, before it was charged."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        for queue in self._queues.values():
            yield from queue

    def add(self, request: Request) -> None:
        tenant = request.tenant
        queue = self._queues.get(tenant)
        if not queue:
            self._times[tenant] = max(self._times.get(tenant, 0.0), self._last_time)
        if queue is None:
            queue = self._queues[tenant] = WaitingQueue(self._policy)
            heapq.heappush(self._tenants, (self._times[tenant], tenant))
            self._forget_some()
        queue.add(request)
        self._num_waiting += 1

    def peek(self) -> Request | None:
        while self._tenants:
            time, tenant = self._tenants[0]
            request = self._queues[tenant].peek()
            if request is None:
                heapq.heappop(self._tenants)
                del self._queues[tenant]
            elif time < self._times[tenant]:
                heapq.heapreplace(self._tenants, (self._times[tenant], tenant))
            else:
                return request
        return None

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None
        self._last_time = self._times[request.tenant]
        self._num_waiting -= 1
        return self._queues[request.tenant].pop()

    def remove(self, request: Request) -> bool:
        queue = self._queues.get(request.tenant)
        removed = queue is not None and queue.remove(request)
        self._num_waiting -= removed
        return removed

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens were planned for a tenant; what a preemption makes it compute again counts again."""
        weight = self._weights.get(tenant, DEFAULT_WEIGHT)
        self._times[tenant] = self._times.get(tenant, self._last_time) + num_tokens / weight

    def _forget_some(self) -> None:
        if len(self._times) <= MAX_REMEMBERED_TENANTS:
            return
        idle = sorted((time, tenant) for tenant, time in self._times.items() if tenant not in self._queues)
        for _, tenant in idle[: (len(idle) + 1) // 2]:
            del self._times[tenant]
