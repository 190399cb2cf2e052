"""`reprise events tail`: follow a publisher's KV events, ours or any that speaks the same wire format."""

import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Protocol, TextIO

import msgspec
import zmq
from rich.console import Console
from rich.text import Text

from reprise_core.errors import DataLoss, InvalidInput
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from reprise_wire.event_codec import (
    PublishedBatch,
    decode_batch,
    parse_pub_frames,
    parse_replay_reply,
    replay_request_frames,
)

POLL_MS = 200
REPLAY_ANSWER_TIMEOUT_S = 1.0
"""Silence after which a replay counts as unanswered."""
RECEIVE_LIMIT_BATCHES = 100_000
"""Batches that wait for a slow terminal; beyond it the publisher drops and a gap shows."""
SHOWN_HASHES = 4


def tail(
    endpoint: str,
    *,
    replay: str = "",
    start: int | None = None,
    topic: str = "",
    as_json: bool = False,
    count: int = 0,
    file: TextIO | None = None,
) -> int:
    """Print batches until `count` of them (0 = until interrupted); the exit code.

    With a replay endpoint, gaps are filled from it, and `start` (`--from`) is where to begin; without
    one, gaps are said.
    """
    if start is not None and not replay:
        raise InvalidInput("--from", "needs --replay ENDPOINT, where earlier batches are kept")
    printer: Printer = JsonPrinter(file) if as_json else TextPrinter(file)
    follower = Follower(endpoint, replay=replay, start=start, topic=topic, printer=printer)
    try:
        follower.run(count)
    except KeyboardInterrupt:
        return 0
    finally:
        follower.close()
    return 0


class Printer(Protocol):
    def batch(self, message: PublishedBatch, batch: KvEventBatch, *, replayed: bool) -> None: ...

    def notice(self, kind: str, text: str, **facts: int | str) -> None: ...


class Follower:
    """Live batches in order, with what a replay has to fill the gaps between them."""

    def __init__(
        self, endpoint: str, *, replay: str, start: int | None, topic: str, printer: Printer
    ) -> None:
        self._context = zmq.Context()
        self._live = _connect(self._context, zmq.SUB, "--endpoint", endpoint)
        self._live.subscribe(topic)
        self._replay_endpoint = replay
        self._topic = topic
        self._printer = printer
        self._start = start
        self._expected: int | None = start
        self._last_live: int | None = None
        """Live numbers ascend, so a lower one is another publisher's."""
        self._num_shown = 0
        self._stopping = threading.Event()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def stop(self) -> None:
        """Ends `run` within POLL_MS; may be called from another thread."""
        self._stopping.set()

    def run(self, count: int) -> None:
        for message, replayed in self._messages():
            self._show(message, replayed)
            if count and self._num_shown >= count:
                return

    def _messages(self) -> Iterator[tuple[PublishedBatch, bool]]:
        if self._start is not None:
            yield from self._replayed(self._start, until=None)
        while not self._stopping.is_set():
            message = self._next_live()
            if message is None:
                continue
            if self._last_live is not None and message.sequence <= self._last_live:
                self._printer.notice(
                    "restart", "the publisher began anew", was=self._last_live, now=message.sequence
                )
                self._expected = 0
            self._last_live = message.sequence
            if self._expected is not None and message.sequence < self._expected:
                continue  # A replay brought it already.
            yield from self._before(message)
            yield message, False

    def _before(self, message: PublishedBatch) -> Iterator[tuple[PublishedBatch, bool]]:
        """What lies between the last batch and this one: from the replay, the rest as a notice."""
        if self._expected is None or message.sequence == self._expected:
            return
        if self._replay_endpoint:
            yield from self._replayed(self._expected, until=message.sequence)
        self._say_gap(message.sequence)

    def _replayed(self, start: int, *, until: int | None) -> Iterator[tuple[PublishedBatch, bool]]:
        for message in self._ask_replay(start):
            if until is not None and message.sequence >= until:
                continue
            if message.topic.startswith(self._topic) and message.sequence >= (self._expected or 0):
                self._say_gap(message.sequence)
                yield message, True

    def _say_gap(self, sequence: int) -> None:
        if self._expected is not None and self._expected < sequence:
            num_missing = sequence - self._expected
            self._printer.notice(
                "gap", f"{num_missing} batches are missing", first=self._expected, last=sequence - 1
            )
            self._expected = sequence

    def _next_live(self) -> PublishedBatch | None:
        if not self._live.poll(POLL_MS):
            return None
        try:
            return parse_pub_frames(self._live.recv_multipart())
        except DataLoss as error:
            self._printer.notice("malformed", str(error))
            return None

    def _ask_replay(self, start: int) -> Iterator[PublishedBatch]:
        dealer = _connect(self._context, zmq.DEALER, "--replay", self._replay_endpoint)
        try:
            dealer.send_multipart(replay_request_frames(start))
            while True:
                if not dealer.poll(int(REPLAY_ANSWER_TIMEOUT_S * 1000)):
                    self._printer.notice("replay", "no answer", endpoint=self._replay_endpoint)
                    return
                message = parse_replay_reply(dealer.recv_multipart())
                if message is None:
                    return
                yield message
        except DataLoss as error:
            self._printer.notice("malformed", str(error))
        finally:
            dealer.close()

    def _show(self, message: PublishedBatch, replayed: bool) -> None:
        self._expected = message.sequence + 1
        self._num_shown += 1
        unknown: list[str] = []
        try:
            batch = decode_batch(message.payload, on_unknown=unknown.append)
        except DataLoss as error:
            self._printer.notice("malformed", str(error), sequence=message.sequence)
            return
        self._printer.batch(message, batch, replayed=replayed)
        for name in unknown:
            self._printer.notice("unknown", f"event type {name!r}", sequence=message.sequence)


class TextPrinter:
    """One line per batch and per event, for people."""

    def __init__(self, file: TextIO | None) -> None:
        self._console = Console(file=file, highlight=False, soft_wrap=True)

    def batch(self, message: PublishedBatch, batch: KvEventBatch, *, replayed: bool) -> None:
        clock = datetime.fromtimestamp(batch.ts).astimezone().strftime("%H:%M:%S.%f")[:-3]
        head = Text.assemble((clock, "dim"), "  seq ", (str(message.sequence), "bold"))
        if batch.data_parallel_rank:
            head.append(f"  rank {batch.data_parallel_rank}")
        head.append(f"  {message.topic}", "dim")
        if not batch.events:
            head.append("  (heartbeat)", "dim")
        if replayed:
            head.append("  replayed", "yellow")
        self._console.print(head)
        for event in batch.events:
            self._console.print(_event_line(event))

    def notice(self, kind: str, text: str, **facts: int | str) -> None:
        details = ", ".join(f"{name} {value}" for name, value in facts.items())
        self._console.print(Text(f"-- {kind}: {text}" + (f" ({details})" if details else ""), "bold red"))


class JsonPrinter:
    """One object per line: a batch with all its fields, or a notice."""

    def __init__(self, file: TextIO | None) -> None:
        self._console = Console(file=file, highlight=False, soft_wrap=True, markup=False)

    def batch(self, message: PublishedBatch, batch: KvEventBatch, *, replayed: bool) -> None:
        self._print(
            {
                "seq": message.sequence,
                "topic": message.topic,
                "ts": batch.ts,
                "rank": batch.data_parallel_rank,
                "replayed": replayed,
                "events": [_plain(event) for event in batch.events],
            }
        )

    def notice(self, kind: str, text: str, **facts: int | str) -> None:
        self._print({"notice": kind, "text": text, **facts})

    def _print(self, value: dict[str, Any]) -> None:
        self._console.out(msgspec.json.encode(value, enc_hook=str).decode(), highlight=False)


def _event_line(event: KvEvent) -> Text:
    if isinstance(event, AllBlocksCleared):
        return Text("    cleared   all blocks", "magenta")
    num_blocks = len(event.block_hashes)
    place = (
        f"{event.medium or 'GPU'} group {event.group_idx or 0}  {num_blocks} {_plural('block', num_blocks)}"
    )
    if isinstance(event, BlockRemoved):
        return Text.assemble(("    removed   ", "red"), place, "  ", (_hashes(event), "cyan"))
    line = Text.assemble(("    stored    ", "green"), place)
    line.append(f"  {len(event.token_ids)} {_plural('token', len(event.token_ids))}  ")
    line.append(_hashes(event), "cyan")
    if event.parent_block_hash is not None:
        line.append(f"  after {short_hash(event.parent_block_hash)}", "dim")
    if event.lora_name:
        line.append(f"  adapter {event.lora_name}")
    return line


def _hashes(event: BlockStored | BlockRemoved) -> str:
    shown = " ".join(short_hash(block_hash) for block_hash in event.block_hashes[:SHOWN_HASHES])
    num_more = len(event.block_hashes) - SHOWN_HASHES
    return f"{shown} +{num_more}" if num_more > 0 else shown


def short_hash(block_hash: int | bytes) -> str:
    """The same 8 digits whether the engine sends 64 bits or the whole digest."""
    number = block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")
    return f"{number:016x}"[:8]


def _plain(event: KvEvent) -> dict[str, Any]:
    """All fields by name; a digest as hexadecimal text."""
    fields = msgspec.to_builtins(event, builtin_types=(bytes,))
    plain: dict[str, Any] = _hex_bytes(fields)
    return plain


def _hex_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _hex_bytes(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hex_bytes(item) for item in value]
    return value


def _plural(noun: str, number: int) -> str:
    return noun if number == 1 else f"{noun}s"


def _connect(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, option: str, endpoint: str
) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.linger = 0
    socket.rcvhwm = RECEIVE_LIMIT_BATCHES
    socket.ipv6 = "[" in endpoint
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise InvalidInput(option, f"{endpoint!r}, {error.strerror}; must be like tcp://HOST:PORT") from error
    return socket
