"""Schedulers that are not ours: the one in docs/publisher.md, as it stands there, and plainer ones."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from reprise_core.kv_events import AllBlocksCleared
from reprise_wire.event_codec import decode_batch
from reprise_wire.event_snapshot import SnapshotChunk, parse_snapshot_answer, snapshot_request_frames
from support.event_source import stored
from support.publisher_harness import RunningPublisher, running_publisher
from support.valkey_server import free_port
from support.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "publisher.md"


@contextmanager
def example(folder: Path, endpoint: str, num_prompts: int) -> Iterator[None]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = folder / "scheduler.py"
    script.write_text(code)
    process = subprocess.Popen([sys.executable, str(script), endpoint, str(num_prompts)])
    try:
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


async def snapshot(publisher: RunningPublisher) -> SnapshotChunk:
    socket = publisher.dealer()
    socket.send_multipart(snapshot_request_frames())
    return parse_snapshot_answer(await asyncio.to_thread(socket.recv_multipart))


def stored_hashes(chunk: SnapshotChunk) -> list[object]:
    events = decode_batch(chunk.payload).events
    assert isinstance(events[0], AllBlocksCleared)
    return sorted(h for event in events[1:] for h in event.block_hashes)


async def test_the_example_of_the_page_from_its_first_batch(tmp_path: Path) -> None:
    async with running_publisher(data_parallel_rank=2) as publisher:
        with example(tmp_path, publisher.app.sockets.intake_endpoint, 10):
            await publisher.published(11)
            chunk = await snapshot(publisher)
            assert stored_hashes(chunk) == [1006, 1007, 1008, 1009]
            assert (chunk.meta.complete, chunk.meta.num_blocks, chunk.meta.rank) == (True, 4, 2)
            assert decode_batch(chunk.payload).data_parallel_rank == 2


async def test_the_example_answers_a_publisher_that_comes_later(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with example(tmp_path, endpoint, 7):
        async with running_publisher(intake_endpoint=endpoint) as first:
            await until(lambda: first.metric("complete") == 1, 20)
        async with running_publisher(intake_endpoint=endpoint) as second:
            await until(lambda: second.metric("states_total", outcome="received") == 1, 20)
            await until(lambda: second.metric("complete") == 1)
            chunk = await snapshot(second)
            assert stored_hashes(chunk) == [1003, 1004, 1005, 1006]
            assert chunk.meta.complete


async def test_one_that_ignores_the_question_is_followed() -> None:
    async with running_publisher(state_timeout_s=0.2) as publisher:
        scheduler = publisher.scheduler
        scheduler.sequence = 5
        scheduler.offer_events(stored(1))
        scheduler.offer_events(stored(2))
        await until(lambda: publisher.metric("states_total", outcome="given_up") == 1)
        chunk = await snapshot(publisher)
        assert stored_hashes(chunk) == [1, 2]
        assert not chunk.meta.complete
        status = await publisher.status()
        assert (status.complete, status.record_blocks) == (False, 2)
        scheduler.offer_events(AllBlocksCleared(), stored(3))
        await until(lambda: publisher.metric("complete") == 1)
        assert stored_hashes(await snapshot(publisher)) == [3]


async def test_one_of_another_version_is_refused_with_both_named(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_publisher() as publisher:
        socket = publisher.scheduler.socket
        socket.send_multipart([msgspec.msgpack.encode([1, b"e" * 16, 0]), b"\x93\x00\x90\x00"])
        await until(lambda: publisher.metric("version_refused_total") == 1)
        await publisher.published(1)
        assert publisher.metric("complete") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "refused" in line]
    assert "its_version=1" in line
    assert "our_version=2" in line
