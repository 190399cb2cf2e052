"""A TCP proxy that misbehaves when told to: delays, stalls, swallows what comes, resets connections."""

import asyncio
import contextlib


class TcpProxy:
    """In front of a port on this machine, which need not be open yet."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._swallowing = False
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0
        self.delay_s = 0.0
        """Before each piece of up to 64 KiB, in both directions: latency, and a limit on the throughput."""
        self.num_resets = 0
        self.num_swallowed_bytes = 0

    async def __aenter__(self) -> "TcpProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def stall(self, seconds: float) -> None:
        """Nothing passes, and nothing is lost."""
        self.hold()
        try:
            await asyncio.sleep(seconds)
        finally:
            self.let_go()

    def hold(self) -> None:
        """A stall until `let_go`."""
        self._flowing.clear()

    def let_go(self) -> None:
        self._flowing.set()

    async def swallow(self, seconds: float) -> None:
        """What comes is read and lost; then all connections break, as a broken stream cannot go on."""
        self._swallowing = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self.reset()
            self._swallowing = False

    @property
    def has_connections(self) -> bool:
        return bool(self._writers)

    def reset(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
            self.num_resets += 1
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        for source, target in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, target))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                if self._swallowing:
                    self.num_swallowed_bytes += len(data)
                    continue
                target.write(data)
                await target.drain()
        self._writers.discard(target)
        target.transport.abort()
