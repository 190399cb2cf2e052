"""`reprise events tail`: print a publisher's KV events, ours or any that speaks the same wire format."""

from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol, TextIO

import msgspec
from rich.console import Console
from rich.text import Text

from reprise_cli.event_session import Session
from reprise_core.errors import InvalidInput
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from reprise_wire.event_source_values import Delivery, DeliveryKind, Notice, SourceOptions
from reprise_wire.source_sockets import SourceAddress

ANSWER_S = 2.0
"""Silence after which a replay counts as unanswered; a person waits."""
SHOWN_HASHES = 4


class Printer(Protocol):
    def batch(self, delivery: Delivery) -> None: ...

    def notice(self, notice: Notice) -> None: ...


def tail(
    address: SourceAddress,
    *,
    start: int | None = None,
    snapshot: bool = False,
    as_json: bool = False,
    with_tokens: bool = False,
    count: int = 0,
    for_s: float = 0.0,
    file: TextIO | None = None,
    is_done: Callable[[], bool] = lambda: False,
) -> int:
    """Print batches until `count` of them (0 = no limit), or for so long; the exit code.

    With a replay endpoint, gaps are filled from it, and `start` (`--from`) is where to begin, or
    `snapshot`: with the state. Without one, gaps are said.
    """
    for option, wanted in (("--from", start is not None), ("--snapshot", snapshot)):
        if wanted and not address.replay_endpoint:
            raise InvalidInput(option, "needs --replay ENDPOINT, where earlier batches are kept")
    printer: Printer = JsonPrinter(file, with_tokens) if as_json else TextPrinter(file, with_tokens)
    num_shown = 0

    def show(delivery: Delivery) -> None:
        nonlocal num_shown
        if delivery.kind is DeliveryKind.CLEARED or (count and num_shown >= count):
            return
        num_shown += 1
        printer.batch(delivery)

    def note(notice: Notice) -> None:
        if not (count and num_shown >= count):
            printer.notice(notice)

    options = SourceOptions(
        snapshots=snapshot, start=0 if snapshot else start, answer_s=ANSWER_S, max_attempts=2
    )
    session = Session(address, options, on_delivery=show, on_notice=note)
    session.run(lambda: is_done() or (count > 0 and num_shown >= count), for_s=for_s)
    return 0


class TextPrinter:
    """One line per batch and per event, for people."""

    def __init__(self, file: TextIO | None, with_tokens: bool) -> None:
        self._console = Console(file=file, highlight=False, soft_wrap=True)
        self._with_tokens = with_tokens

    def batch(self, delivery: Delivery) -> None:
        batch = delivery.batch
        clock = datetime.fromtimestamp(batch.ts).astimezone().strftime("%H:%M:%S.%f")[:-3]
        head = Text.assemble((clock, "dim"), "  seq ", (str(delivery.sequence), "bold"))
        if batch.data_parallel_rank:
            head.append(f"  rank {batch.data_parallel_rank}")
        head.append(f"  {delivery.topic}", "dim")
        if not batch.events:
            head.append("  (heartbeat)", "dim")
        if delivery.kind is not DeliveryKind.LIVE:
            head.append("  replayed" if delivery.kind is DeliveryKind.REPLAY else "  snapshot", "yellow")
        self._console.print(head)
        for event in batch.events:
            self._console.print(_event_line(event, self._with_tokens))

    def notice(self, notice: Notice) -> None:
        details = ", ".join(f"{name} {value}" for name, value in notice.facts.items())
        line = f"-- {notice.kind}: {notice.text}" + (f" ({details})" if details else "")
        self._console.print(Text(line, "bold red"))


class JsonPrinter:
    """One object per line: a batch with all its fields, or a notice."""

    def __init__(self, file: TextIO | None, with_tokens: bool) -> None:
        self._console = Console(file=file, highlight=False, soft_wrap=True, markup=False)
        self._with_tokens = with_tokens

    def batch(self, delivery: Delivery) -> None:
        batch = delivery.batch
        self._print(
            {
                "seq": delivery.sequence,
                "topic": delivery.topic,
                "ts": batch.ts,
                "rank": batch.data_parallel_rank,
                "kind": delivery.kind.value,
                "replayed": delivery.kind is DeliveryKind.REPLAY,
                "events": [_plain(event, self._with_tokens) for event in batch.events],
            }
        )

    def notice(self, notice: Notice) -> None:
        self._print({"notice": notice.kind, "text": notice.text, **notice.facts})

    def _print(self, value: dict[str, Any]) -> None:
        self._console.out(msgspec.json.encode(value, enc_hook=str).decode(), highlight=False)


def _event_line(event: KvEvent, with_tokens: bool) -> Text:
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
    if with_tokens:
        line.append(f"  {list(event.token_ids)}", "dim")
    return line


def _hashes(event: BlockStored | BlockRemoved) -> str:
    shown = " ".join(short_hash(block_hash) for block_hash in event.block_hashes[:SHOWN_HASHES])
    num_more = len(event.block_hashes) - SHOWN_HASHES
    return f"{shown} +{num_more}" if num_more > 0 else shown


def short_hash(block_hash: int | bytes) -> str:
    """The same 8 digits whether the engine sends 64 bits or the whole digest."""
    number = block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")
    return f"{number:016x}"[:8]


def _plain(event: KvEvent, with_tokens: bool) -> dict[str, Any]:
    """All fields by name, a digest as hexadecimal text; of tokens their number, unless they are asked for."""
    fields: dict[str, Any] = _hex_bytes(msgspec.to_builtins(event, builtin_types=(bytes,)))
    if isinstance(event, BlockStored) and not with_tokens:
        fields.pop("lookahead_token_ids", None)
        fields["num_tokens"] = len(fields.pop("token_ids"))
    return fields


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
