"""Block bytes in shared memory: leases, dying workers, restarted stores, and the way without any."""

import asyncio
import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from reprise_core.steps import LoadReport, pack_ids
from reprise_runtime.shared_memory import MAX_MESSAGE_NBYTES, Memory, join, make_memory
from reprise_wire.block_transfer import (
    TRANSFER_VERSION,
    Place,
    TransferHeader,
    TransferKind,
    encode_transfer,
)
from support.store_harness import KEYSPACE, Peer, RunningStore, block_hashes, keys_of, running_store
from support.valkey_server import free_port
from support.waiting import until
from support.worker_link import LinkedWorker, linked_worker
from support.worker_peers import StorePeer

KIB = 1024


async def generation_of(store: RunningStore) -> int:
    return (await store.client.lookup(KEYSPACE, [0], [])).generation


async def shared_with(worker: LinkedWorker, *, shared: bool = True) -> None:
    await until(lambda: worker.metric("store_memory_shared") == shared, 10)


@contextmanager
def no_memory() -> Iterator[None]:
    """The system refuses files, and so shared memory, above a kilobyte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (KIB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_leased_value_stays_when_it_is_evicted() -> None:
    async with running_store(capacity_bytes=20_000) as store:
        await store.peer.share_memory()
        generation = await generation_of(store)
        first, *others = keys_of(block_hashes(8))
        await store.peer.save(generation, [first], [b"a" * 9000])
        store.peer.keeps_leases = True
        loaded, _ = await store.peer.load(generation, [first])
        assert store.metric("memory_leases") == 1
        for key in others:
            await store.peer.save(generation, [key], [b"b" * 9000])
        assert store.metric("host_evictions_total") >= 6
        assert store.peer.read(loaded.places, []) == [b"a" * 9000]
        await store.peer.release(loaded.transfer_id, 12345)
        await until(lambda: store.metric("memory_leases") == 0)
        store.app._arena.check_invariants()


async def test_a_killed_workers_leases_end_at_once() -> None:
    async with running_store() as store:
        await store.peer.share_memory()
        generation = await generation_of(store)
        await store.peer.save(generation, keys_of(block_hashes(1)), [b"v" * 100_000])
        tests = str(Path(__file__).parents[1])
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "support.lease_holder",
            store.app.blocks_endpoint,
            str(generation),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": tests},
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(60):
                assert await process.stdout.readline() == b"holding\n"
            assert (store.metric("memory_leases"), store.metric("memory_peers")) == (1, 2)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await until(lambda: (store.metric("memory_leases"), store.metric("memory_peers")) == (0, 1))
        assert store.metric("memory_leases_expired_total") == 0
        await store.app.store.reset(KEYSPACE)
        store.app._arena.check_invariants()
        assert not store.app._arena._used


async def test_a_lease_that_nobody_releases_runs_out() -> None:
    async with running_store(lease_timeout_s=0.1) as store:
        await store.peer.share_memory()
        generation = await generation_of(store)
        await store.peer.save(generation, keys_of(block_hashes(1)), [b"v" * 9000])
        store.peer.keeps_leases = True
        await store.peer.load(generation, keys_of(block_hashes(1)))
        await until(lambda: store.metric("memory_leases_expired_total") == 1)
        assert store.metric("memory_leases") == 0
        assert store.metric("memory_peers") == 1


async def test_values_without_room_in_the_arena_travel_as_frames() -> None:
    async with running_store(capacity_bytes=1 << 20) as store:
        await store.peer.share_memory()
        generation = await generation_of(store)
        store.app._arena._budget_bytes = 64 * KIB
        values = [bytes([number]) * 30_000 for number in range(4)]
        saved = await store.peer.save(generation, keys_of(block_hashes(4)), values)
        assert saved.accepted == (True,) * 4
        loaded, got = await store.peer.load(generation, keys_of(block_hashes(5)))
        assert got == [*values, b""]
        assert [place.offset < 0 for place in loaded.places] == [False, False, True, True, False]
        assert store.metric("memory_full_total") == 2


async def test_places_that_are_wrong_are_refused_and_end_nothing() -> None:
    async with running_store() as store:
        generation = await generation_of(store)
        keys = keys_of(block_hashes(1))

        async def refusal(place: Place, peer: Peer = store.peer) -> str:
            answer, _ = await peer.ask(TransferKind.SAVE, generation, keys, places=[place])
            assert answer.kind == TransferKind.REFUSED
            return answer.reason

        assert await refusal(Place(0, 100)) == "memory"  # it shares none
        await store.peer.share_memory()
        assert await refusal(Place(1 << 40, 100)) == "memory"
        assert await refusal(Place(0, 1 << 40)) == "malformed"
        assert await refusal(Place(-2, 10)) == "malformed"
        store.peer.leave()
        await until(lambda: store.metric("memory_peers") == 0)
        assert await refusal(Place(0, 100)) == "memory"
        store.peer.own = None
        assert (await store.peer.save(generation, keys, [b"v"])).accepted == (True,)


async def test_strangers_at_the_memory_socket_get_nothing(tmp_path: Path) -> None:
    address = str(tmp_path / "blocks.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(address)  # the file of a store that was killed
    async with running_store(shared_memory=address) as store:
        with pytest.raises(OSError, match="does not share"):
            await asyncio.to_thread(join, address, b"x" * 16, None, timeout_s=5)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rude:
            rude.connect(address)
            rude.send(b"GET / HTTP/1.1")
            rude.settimeout(5)
            assert await asyncio.to_thread(rude.recv, 10) == b""
        await store.peer.share_memory()
        pretended = make_memory("short", KIB)
        pretended.nbytes = 1 << 30  # more than there is
        offer = store.app._memory_peers.offer(b"peer")
        with pytest.raises(OSError, match="does not share"):
            await asyncio.to_thread(join, address, offer.token, pretended, timeout_s=5)
        unsealed = Memory(os.memfd_create("unsealed"), KIB)
        os.ftruncate(unsealed.fd, KIB)
        offer = store.app._memory_peers.offer(b"another")
        with pytest.raises(OSError, match="does not share"):
            await asyncio.to_thread(join, address, offer.token, unsealed, timeout_s=5)
        assert store.metric("memory_peers") == 1
        with pytest.raises(PermissionError):
            os.ftruncate(pretended.fd, 0)


@pytest.mark.parametrize("shared", [True, False])
async def test_a_workers_blocks_go_and_come_back(shared: bool) -> None:
    async with running_store() as store:
        generation = await generation_of(store)
        hashes = block_hashes(30)
        with linked_worker(store.app.blocks_endpoint, KEYSPACE, shared_memory=shared) as worker:
            await shared_with(worker, shared=shared)
            before = [worker.content(block) for block in range(30)]
            assert worker.save(range(30), hashes, generation) == 0
            await until(lambda: worker.metric("saves_total") == 30)
            report = await asyncio.to_thread(worker.load, range(30, 60), hashes, generation)
            assert report == LoadReport(1, 0)
            assert all(torch.equal(worker.content(30 + i), block) for i, block in enumerate(before))
            assert worker.metric("staging_blocks_used") == 0
            await until(lambda: store.metric("memory_leases") == 0)


@pytest.mark.parametrize("shared", [True, False])
async def test_eight_blocks_that_are_overwritten_at_once_keep_their_contents(shared: bool) -> None:
    """A slowed store: every block is saved and given other contents many times over."""
    async with running_store() as store:
        generation = await generation_of(store)
        save = store.app.store.save

        async def slow_save(*arguments: object) -> list[bool]:
            await asyncio.sleep(0.01)
            return await save(*arguments)  # type: ignore[arg-type]

        store.app.store.save = slow_save  # type: ignore[method-assign]
        hashes, contents = block_hashes(120), []
        with linked_worker(store.app.blocks_endpoint, KEYSPACE, num_blocks=8, shared_memory=shared) as worker:
            await shared_with(worker, shared=shared)
            for number, digest in enumerate(hashes):
                block = number % 8
                worker.kv.keys[0][block].uniform_()
                contents.append(worker.content(block))
                while worker.save([block], [digest], generation):
                    await asyncio.sleep(0.005)
                worker.kv.keys[0][block].zero_()
            await until(lambda: worker.metric("saves_total") == 120, 30)
            for number, digest in enumerate(hashes):
                report = await asyncio.to_thread(worker.load, [number % 8], [digest], generation)
                assert report == LoadReport(1, 0)
                assert torch.equal(worker.content(number % 8), contents[number])


async def test_a_store_that_is_restarted_shares_anew() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    hashes = block_hashes(4)
    with linked_worker(endpoint, KEYSPACE) as worker:
        for _ in range(2):
            async with running_store(blocks_endpoint=endpoint) as store:
                await shared_with(worker)
                generation = await generation_of(store)
                # The new store is empty: what the old one's memory held is not served.
                report = await asyncio.to_thread(worker.load, [9], hashes[:1], generation)
                assert report == LoadReport(1, 0, pack_ids([9]), "missing")
                saved = worker.metric("saves_total")
                worker.save(range(4), hashes, generation)
                await until(lambda saved=saved: worker.metric("saves_total") == saved + 4)  # type: ignore[misc]
                report = await asyncio.to_thread(worker.load, range(20, 24), hashes, generation)
                assert report == LoadReport(1, 0)
                assert torch.equal(worker.content(20), worker.content(0))
            await shared_with(worker, shared=False)


async def test_a_connection_that_breaks_is_made_again() -> None:
    """The store and the way over ZMQ stay."""
    async with running_store() as store:
        generation = await generation_of(store)
        hashes = block_hashes(4)
        with linked_worker(store.app.blocks_endpoint, KEYSPACE) as worker:
            for number in range(3):
                await until(lambda: store.metric("memory_peers") == 1)
                await shared_with(worker)
                saved = worker.metric("saves_total")
                worker.save(range(4), hashes, generation)
                await until(lambda saved=saved: worker.metric("saves_total") == saved + 4)  # type: ignore[misc]
                report = await asyncio.to_thread(worker.load, range(20, 24), hashes, generation)
                assert report == LoadReport(1, 0)
                (peer,) = store.app._memory_peers._peers.values()
                peer._ended.set_exception(OSError(f"cut for the {number + 1}. time"))
                await until(lambda peer=peer: peer not in store.app._memory_peers._peers.values())  # type: ignore[misc]
            await until(lambda: store.metric("memory_leases") == 0)


async def test_messages_without_values_come_and_go_over_the_connection() -> None:
    async with running_store(capacity_bytes=1 << 20) as store:
        await store.peer.share_memory()
        generation = await generation_of(store)
        await store.peer.save(generation, keys_of(block_hashes(1)), [b"v" * 9000])
        await store.peer.load(generation, keys_of(block_hashes(1)))
        assert not await store.peer.socket.poll(0)
        store.app._blocks._reader.stop()  # nobody reads ZMQ
        _, values = await store.peer.load(generation, keys_of(block_hashes(2)))
        assert values == [b"v" * 9000, b""]
        assert (await store.peer.save(generation, keys_of(block_hashes(1)), [b"w" * 9000])).accepted == (
            True,
        )


async def test_what_is_no_message_on_the_connection_ends_nothing() -> None:
    async with running_store() as store:
        await store.peer.share_memory()
        assert store.peer.connection is not None
        store.peer.connection.send(b"GET / HTTP/1.1")
        await until(lambda: store.metric("malformed_total") == 1)
        store.peer.connection.send(b"x" * (MAX_MESSAGE_NBYTES + 1))
        await until(lambda: store.metric("memory_peers") == 0)
        with pytest.raises(OSError, match="gone"):
            store.peer.connection.receive()
        store.peer.leave()
        store.peer.own = store.peer.theirs = None
        await save_and_load(store)


async def test_a_worker_that_does_not_read_its_answers_loses_them() -> None:
    async with running_store() as store:
        await store.peer.share_memory()
        assert store.peer.connection is not None
        generation = await generation_of(store)
        header = TransferHeader(
            TRANSFER_VERSION, TransferKind.LOAD, 1, KEYSPACE, generation, keys_of(block_hashes(500))
        )
        message = encode_transfer(header)

        async with asyncio.timeout(30):
            while not store.metric("replies_dropped_total"):
                store.peer.connection.send(message)
                await asyncio.sleep(0)
            await until(lambda: not store.metric("loads_waiting"))
        while store.peer.connection.receive() is not None:
            await asyncio.sleep(0.01)
        await store.peer.save(generation, keys_of(block_hashes(1)), [b"v" * 9000])


async def test_a_store_without_memory_falls_back_to_messages() -> None:
    with no_memory():
        async with running_store() as store:
            with pytest.raises(OSError, match="offers no memory"):
                await store.peer.share_memory()
            await save_and_load(store)


async def test_a_worker_without_memory_saves_by_message_and_loads_by_place() -> None:
    async with running_store() as store:
        with no_memory():
            worker = LinkedWorker(store.app.blocks_endpoint, KEYSPACE)
        assert worker.transfers.staging_memory is None
        worker.link.start()
        try:
            await shared_with(worker)
            generation = await generation_of(store)
            worker.save([1], block_hashes(1), generation)
            await until(lambda: worker.metric("saves_total") == 1)
            assert await asyncio.to_thread(worker.load, [2], block_hashes(1), generation) == LoadReport(1, 0)
            assert torch.equal(worker.content(1), worker.content(2))
        finally:
            worker.link.stop()


async def test_switched_off_at_the_store() -> None:
    async with running_store(shared_memory="off") as store:
        with pytest.raises(OSError, match="offers no memory"):
            await store.peer.share_memory()
        await save_and_load(store)


async def test_a_store_of_another_version_makes_nobody_wait() -> None:
    store = StorePeer()

    def refuse_hello() -> None:
        name, _ = store.socket.recv_multipart()
        refused = TransferHeader(TRANSFER_VERSION - 1, TransferKind.REFUSED, 1, reason="version")
        store.socket.send_multipart([name, encode_transfer(refused)])

    try:
        with linked_worker(store.endpoint, KEYSPACE) as worker:
            assert store.socket.poll(10_000)
            refuse_hello()
            report = await asyncio.to_thread(worker.load, [3], block_hashes(1), 1)
            assert report == LoadReport(1, 0, pack_ids([3]), "refused")
            worker.save([1], block_hashes(1), 1)
            await until(lambda: worker.metric("saves_failed_total", reason="refused") == 1)
    finally:
        store.close()


async def save_and_load(store: RunningStore) -> None:
    generation = await generation_of(store)
    keys = keys_of(block_hashes(2))
    await store.peer.save(generation, keys, [b"v" * 9000, b"w"])
    assert (await store.peer.load(generation, keys))[1] == [b"v" * 9000, b"w"]
