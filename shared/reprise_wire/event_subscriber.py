"""Following publishers of KV events, ours and vLLM's: one object for any number of them.

It connects, subscribes, takes the state (a snapshot, or a replay from 0), fills gaps, notices restarts, and
delivers every batch once and in order. Each source has a state: exact, partial or off (docs/events.md).

    subscriber = EventSubscriber(on_delivery=index.apply)
    subscriber.add(SourceAddress("engine-0", "tcp://host:5557", "tcp://host:5657"))
    await subscriber.run()          # in an event loop; elsewhere: while ...: subscriber.turn(0.2)

Nothing in it is shared between threads: callbacks run where `run` or `turn` does.
"""

import asyncio
from collections.abc import Callable
from time import monotonic

import zmq

from reprise_core.errors import InvalidInput
from reprise_wire.event_source import EventSource
from reprise_wire.event_source_values import Delivery, Notice, SourceOptions, SourceState
from reprise_wire.source_sockets import Context, Socket, SourceAddress, SourceSockets

BURST_MESSAGES = 64
"""Of one source, before the others and the event loop have their turn."""
IDLE_WAKE_S = 60.0

StateChange = Callable[[str, SourceState, SourceState], None]


class EventSubscriber:
    """`on_delivery` gets batches, `on_notice` what a log may want, `on_state` (name, from, to) changes.

    Limits are those of `SourceOptions`, per source.
    """

    def __init__(
        self,
        *,
        on_delivery: Callable[[Delivery], None],
        on_notice: Callable[[Notice], None] = lambda notice: None,
        on_state: StateChange = lambda name, was, state: None,
    ) -> None:
        self._on_delivery = on_delivery
        self._on_notice = on_notice
        self._on_state = on_state
        self._context: Context = zmq.Context()
        self._sources: dict[str, SourceSockets] = {}
        self._states: dict[str, SourceState] = {}
        self._owners: dict[Socket, str] = {}
        self._poller = zmq.Poller()
        self._ready: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()

    def add(self, address: SourceAddress, options: SourceOptions = SourceOptions()) -> EventSource:  # noqa: B008
        """Follow one more; the source has state, sequence and counters. Raises InvalidInput."""
        name = address.name
        if name in self._sources:
            raise InvalidInput("name", f"{name!r} is followed already, must be unlike the others")
        source = EventSource(
            name,
            can_ask=bool(address.replay_endpoint),
            deliver=self._on_delivery,
            notify=self._on_notice,
            options=options,
        )
        self._states[name] = source.state
        self._sources[name] = SourceSockets(
            self._context, address, source, lambda socket, on: self._watch(name, socket, on)
        )
        self._make_ready(name)
        return source

    def remove(self, name: str) -> None:
        """Nothing of it is delivered any more; what was, is the caller's to drop. Not from a callback."""
        self._sources.pop(name).close()
        del self._states[name]
        self._ready.discard(name)

    def source(self, name: str) -> EventSource:
        return self._sources[name].source

    @property
    def sources(self) -> list[EventSource]:
        return [sockets.source for sockets in self._sources.values()]

    def turn(self, wait_s: float) -> None:
        """Wait at most so long for something to come, and take it in. Not beside `run`."""
        if not self._ready:
            for socket, _ in self._poller.poll(int(min(wait_s, self._patience_s()) * 1000) + 1):
                self._ready.add(self._owners[socket])
        self._pump()

    async def run(self) -> None:
        """Until cancelled."""
        self._loop = asyncio.get_running_loop()
        for socket in self._owners:
            self._loop.add_reader(socket, self._readable, socket)
        self._ready.update(self._sources)
        try:
            while True:
                self._pump()
                if self._ready:
                    await asyncio.sleep(0)
                    continue
                await self._wait(self._patience_s())
        finally:
            for socket in self._owners:
                self._loop.remove_reader(socket)
            self._loop = None

    def close(self) -> None:
        for name in list(self._sources):
            self.remove(name)
        self._context.destroy(linger=0)

    # --- inside --------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Every source with something to read or a time limit that is up; busy ones stay ready."""
        now_s = monotonic()
        due = [
            name for name, sockets in self._sources.items() if (sockets.source.wake_s or now_s + 1) <= now_s
        ]
        ready, self._ready = self._ready, set()
        for name in ready.union(due):
            sockets = self._sources.get(name)
            if sockets is None:
                continue
            if sockets.pump(BURST_MESSAGES):
                self._ready.add(name)
            self._show_state(sockets.source)

    def _show_state(self, source: EventSource) -> None:
        was, state = self._states.get(source.name), source.state
        if was is not None and was is not state:
            self._states[source.name] = state
            self._on_state(source.name, was, state)

    def _patience_s(self) -> float:
        times = [sockets.source.wake_s for sockets in self._sources.values()]
        wake_s = min((at_s for at_s in times if at_s is not None), default=None)
        return IDLE_WAKE_S if wake_s is None else max(0.0, min(IDLE_WAKE_S, wake_s - monotonic()))

    async def _wait(self, seconds: float) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _readable(self, socket: Socket) -> None:
        self._make_ready(self._owners[socket])

    def _make_ready(self, name: str) -> None:
        self._ready.add(name)
        self._wake.set()

    def _watch(self, name: str, socket: Socket, on: bool) -> None:
        if on:
            self._owners[socket] = name
            self._poller.register(socket, zmq.POLLIN)
            if self._loop is not None:
                self._loop.add_reader(socket, self._readable, socket)
            # Its file descriptor shows only what comes from now on.
            self._make_ready(name)
            return
        del self._owners[socket]
        self._poller.unregister(socket)
        if self._loop is not None:
            self._loop.remove_reader(socket)
