"""`reprise events stats`: what goes through a stream of KV events, and how its source is."""

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from reprise_cli.event_session import Session
from reprise_core.kv_events import MEDIUM_DEVICE, AllBlocksCleared, BlockStored
from reprise_wire.event_source import EventSource
from reprise_wire.event_source_values import Delivery, DeliveryKind, Notice, SourceOptions, plain_counters
from reprise_wire.source_sockets import SourceAddress

MAX_NOTICES = 5


@dataclass
class Amounts:
    """What came in some time. `lag_s` is the largest distance between a live batch's timestamp, on the
    engine's clock, and its arrival on ours."""

    batches: int = 0
    heartbeats: int = 0
    events: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    bytes: int = 0
    lag_s: float = 0.0

    def add(self, delivery: Delivery, now_s: float) -> None:
        batch = delivery.batch
        self.batches += 1
        self.bytes += delivery.num_bytes
        self.heartbeats += not batch.events
        self.events += len(batch.events)
        if delivery.kind is DeliveryKind.LIVE:
            self.lag_s = max(self.lag_s, now_s - batch.ts)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.stored_blocks += len(event.block_hashes)
            elif not isinstance(event, AllBlocksCleared):
                self.removed_blocks += len(event.block_hashes)


@dataclass
class StreamStats:
    """Totals, and what came since the last `report`. `copies` are by medium: stores less removals."""

    total: Amounts = field(default_factory=Amounts)
    recent: Amounts = field(default_factory=Amounts)
    copies: Counter[tuple[int, str]] = field(default_factory=Counter)
    topic: str = ""

    def take(self, delivery: Delivery) -> None:
        if delivery.kind is DeliveryKind.CLEARED:
            self.copies.clear()
            return
        now_s = time.time()
        self.topic = delivery.topic or self.topic
        self.total.add(delivery, now_s)
        self.recent.add(delivery, now_s)
        rank = delivery.batch.data_parallel_rank or 0
        for event in delivery.batch.events:
            if isinstance(event, AllBlocksCleared):
                for place in [place for place in self.copies if place[0] == rank]:
                    del self.copies[place]
            elif isinstance(event, BlockStored):
                self.copies[rank, event.medium or MEDIUM_DEVICE] += (
                    0 if event.report else len(event.block_hashes)
                )
            else:
                self.copies[rank, event.medium or MEDIUM_DEVICE] -= len(event.block_hashes)

    def report(self, source: EventSource, seconds: float) -> dict[str, Any]:
        """One line of `--json`: rates over the last `seconds`, totals, and the source."""
        recent, self.recent = self.recent, Amounts()
        tiers: Counter[str] = Counter()
        for (_, medium), number in self.copies.items():
            tiers[medium] += number
        rates = {
            f"{name}_per_s": round(getattr(recent, name) / seconds, 1)
            for name in ("batches", "events", "stored_blocks", "removed_blocks", "bytes")
        }
        return {
            "state": source.state.value,
            "sequence": source.sequence,
            "topic": self.topic,
            "lag_s": round(recent.lag_s, 4),
            **rates,
            "total_batches": self.total.batches,
            "total_events": self.total.events,
            "heartbeats": self.total.heartbeats,
            "blocks": {medium: number for medium, number in sorted(tiers.items()) if number},
            "buffered_batches": source.num_buffered,
            **plain_counters(source.counters),
        }


def stats(
    address: SourceAddress,
    *,
    as_json: bool = False,
    interval_s: float = 1.0,
    for_s: float = 0.0,
    file: TextIO | None = None,
) -> int:
    """Show rates every `interval_s`, as a view that changes in place or one JSON object a line."""
    collected = StreamStats()
    notices: list[str] = []

    def note(notice: Notice) -> None:
        notices.append(f"{notice.kind}: {notice.text}")
        del notices[:-MAX_NOTICES]

    session = Session(address, SourceOptions(), on_delivery=collected.take, on_notice=note)
    console = Console(file=file, highlight=False, soft_wrap=as_json)
    last_s = time.monotonic()

    def due() -> dict[str, Any] | None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s < interval_s:
            return None
        report = collected.report(session.source, now_s - last_s)
        last_s = now_s
        return report

    def print_json() -> bool:
        if (report := due()) is not None:
            console.out(json.dumps(report), highlight=False)
        return False

    if as_json:
        session.run(print_json, for_s=for_s)
        return 0
    with Live(console=console, auto_refresh=False) as live:

        def redraw() -> bool:
            if (report := due()) is not None:
                live.update(view(address.endpoint, report, notices), refresh=True)
            return False

        session.run(redraw, for_s=for_s)
    return 0


def view(endpoint: str, report: dict[str, Any], notices: list[str]) -> Group:
    colour = {"exact": "green", "partial": "yellow"}.get(report["state"], "red")
    head = Table.grid(padding=(0, 2))
    head.add_row(
        endpoint, report["topic"], f"[{colour}]{report['state']}[/]", f"sequence {report['sequence']}"
    )
    rates = Table("batches/s", "events/s", "stored/s", "removed/s", "KiB/s", "lag ms")
    rates.add_row(
        str(report["batches_per_s"]),
        str(report["events_per_s"]),
        str(report["stored_blocks_per_s"]),
        str(report["removed_blocks_per_s"]),
        f"{report['bytes_per_s'] / 1024:.1f}",
        f"{report['lag_s'] * 1000:.1f}",
    )
    counts = Table("gaps", "replays", "snapshots", "restarts", "holes", "lost connections", "malformed")
    names = ("gaps", "replays", "snapshots", "restarts", "holes", "connections_lost", "malformed")
    counts.add_row(*(str(report[name]) for name in names))
    tiers = "  ".join(f"{medium} {number}" for medium, number in report["blocks"].items()) or "none"
    return Group(head, rates, counts, f"blocks: {tiers}", *notices)
