"""The waiting requests, in the order that the policy serves them.

First come, first served, or by priority and then arrival. A preempted request goes back to where
its order puts it; under FCFS that is the front, because it came before all that still wait.
"""

import heapq
from collections.abc import Iterator

from reprise_scheduler.sched.config import SchedulingPolicy
from reprise_scheduler.sched.request import Request


class WaitingQueue:
    """A heap. O(log n) to add and take, O(1) to remove (the entry is passed over when it comes up)."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.by_priority = policy is SchedulingPolicy.PRIORITY
        self._heap: list[tuple[int, int, int, Request]] = []
        self._live: dict[int, int] = {}

        self._requests: dict[int, Request] = {}
        self._next_entry = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        assert request.sequence not in self._live
        self._next_entry += 1
        self._live[request.sequence] = self._next_entry
        self._requests[request.sequence] = request
        priority = request.priority if self.by_priority else 0
        heapq.heappush(self._heap, (priority, request.sequence, self._next_entry, request))

    def peek(self) -> Request | None:
        while self._heap:
            _, sequence, entry, request = self._heap[0]
            if self._live.get(sequence) == entry:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None
        heapq.heappop(self._heap)
        self._forget(request)
        return request

    def remove(self, request: Request) -> bool:
        return self._forget(request)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens were planned for a tenant; this order does not depend on it."""

    def _forget(self, request: Request) -> bool:
        self._live.pop(request.sequence, None)
        return self._requests.pop(request.sequence, None) is not None
