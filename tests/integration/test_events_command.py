"""`reprise events stats` and `check` against a real publisher, plain and over CURVE."""

import asyncio
import io
import json
import random
from pathlib import Path

import msgspec
import pytest
import zmq
from typer.testing import CliRunner

from reprise_cli.__main__ import app
from reprise_cli.event_check import check, hash_check
from reprise_cli.event_session import read_keys
from reprise_cli.event_stats import stats
from reprise_core.errors import InvalidInput
from reprise_core.kv_events import BlockRemoved
from reprise_wire.source_sockets import SourceAddress
from support.cache_workload import SEED_TEXT
from support.event_feeder import EventFeeder, fed_publisher, published
from support.publisher_harness import RunningPublisher


def seeded() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def address_of(publisher: RunningPublisher) -> SourceAddress:
    sockets = publisher.app.sockets
    assert sockets is not None
    return SourceAddress("p", sockets.events_endpoint, sockets.replay_endpoint, "kv@")


async def feed(publisher: RunningPublisher, feeder: EventFeeder, steps: int) -> None:
    for _ in range(steps):
        feeder.step()
        await asyncio.sleep(0)
    await published(publisher, feeder)


async def test_a_consistent_publisher_passes_with_its_hashes() -> None:
    async with fed_publisher(seeded(), host_blocks=200) as (publisher, feeder):
        await feed(publisher, feeder, 80)
        hashes = hash_check("xxhash_cbor", seed=SEED_TEXT, root="")
        out = io.StringIO()
        code = await asyncio.to_thread(check, address_of(publisher), hashes, as_json=True, file=out)
        report = json.loads(out.getvalue())
        assert code == 0, report
        assert report["consistent"]
        assert report["state"] == "exact"
        assert report["hashes_checked"] > 50


async def test_a_fault_is_found_live_and_the_exit_code_says_so() -> None:
    async with fed_publisher(seeded()) as (publisher, feeder):
        await feed(publisher, feeder, 20)
        out = io.StringIO()
        checking = asyncio.ensure_future(
            asyncio.to_thread(check, address_of(publisher), None, for_s=3.0, file=out)
        )
        while not checking.done():
            feeder.sender.send([BlockRemoved(block_hashes=(12345,), medium="GPU", group_idx=0)])
            await asyncio.sleep(0.05)
        assert await checking == 1
        assert "unknown removal" in out.getvalue()
        assert "0000000000003039, GPU" in out.getvalue()


async def test_nothing_heard_is_a_code_of_its_own() -> None:
    out = io.StringIO()
    address = SourceAddress("p", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
    assert await asyncio.to_thread(check, address, None, for_s=0.3, file=out) == 2
    assert "nothing was heard" in out.getvalue()
    with pytest.raises(InvalidInput, match="--for"):
        check(SourceAddress("p", "tcp://127.0.0.1:1"), None)


async def test_stats_show_rates_state_and_tiers_and_no_token() -> None:
    async with fed_publisher(seeded(), host_blocks=200, heartbeat_s=0.1) as (publisher, feeder):
        await feed(publisher, feeder, 40)
        out = io.StringIO()
        watching = asyncio.ensure_future(
            asyncio.to_thread(stats, address_of(publisher), as_json=True, interval_s=0.3, for_s=3.0, file=out)
        )
        while not watching.done():
            feeder.step()
            await asyncio.sleep(0.02)
        await watching
        lines = [json.loads(line) for line in out.getvalue().splitlines()]
        assert len(lines) >= 3
        last = lines[-1]
        assert last["state"] == "exact"
        assert set(last["blocks"]) == {"GPU", "CPU"}
        assert last["snapshots"] == 1
        assert any(line["batches_per_s"] > 0 and line["stored_blocks_per_s"] > 0 for line in lines)
        assert all(0 <= line["lag_s"] < 3 for line in lines)
        assert "token" not in out.getvalue()


async def test_the_live_view_is_drawn() -> None:
    async with fed_publisher(seeded()) as (publisher, feeder):
        await feed(publisher, feeder, 10)
        out = io.StringIO()
        await asyncio.to_thread(stats, address_of(publisher), interval_s=0.2, for_s=1.5, file=out)
        assert "batches/s" in out.getvalue()
        assert "blocks: GPU" in out.getvalue()


async def test_a_publisher_with_curve_is_followed_with_keys(tmp_path: Path) -> None:
    """A stand-in for a publisher whose socket has CURVE, since the keys are what is tested."""
    public, secret = zmq.curve_keypair()
    (tmp_path / "server.pub").write_bytes(public + b"\n")
    ours_public, ours_secret = zmq.curve_keypair()
    (tmp_path / "ours").write_bytes(ours_secret + b"\n")
    keys = read_keys(tmp_path / "server.pub", tmp_path / "ours")
    assert keys is not None
    assert keys.client_public == ours_public
    context = zmq.Context()
    pub = context.socket(zmq.XPUB)
    pub.curve_server, pub.curve_secretkey = True, secret
    port = pub.bind_to_random_port("tcp://127.0.0.1")
    try:
        out = io.StringIO()
        address = SourceAddress("p", f"tcp://127.0.0.1:{port}", keys=keys)
        checking = asyncio.ensure_future(asyncio.to_thread(check, address, None, for_s=2.0, file=out))
        assert await asyncio.to_thread(pub.poll, 5000)
        pub.send_multipart([b"t", (0).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [], 0])])
        assert await checking == 0
        assert "batches 1" in out.getvalue()
    finally:
        context.destroy(linger=0)


def test_bad_keys_and_options_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--key: needs --server-key"):
        read_keys(None, tmp_path / "k")
    (tmp_path / "k").write_text("short")
    with pytest.raises(InvalidInput, match="--server-key"):
        read_keys(tmp_path / "k", None)
    result = CliRunner().invoke(app, ["events", "check", "--replay", "tcp://127.0.0.1:1", "--seed", "0"])
    assert result.exit_code == 2
    assert "--seed: needs --algorithm" in " ".join(result.output.split())
