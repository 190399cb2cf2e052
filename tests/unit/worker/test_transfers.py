"""Saves and loads, without a socket: what is asked, what is written, what is reported."""

import os
from collections.abc import Callable

import pytest
import torch
from prometheus_client import CollectorRegistry

from reprise_core.errors import DataLoss
from reprise_core.steps import (
    BlockLoad,
    LoadReport,
    TransferMeasure,
    TransferReport,
    pack_ids,
    unpack_ids,
)
from reprise_runtime.shared_memory import make_memory
from reprise_wire.block_transfer import (
    TRANSFER_VERSION,
    Keyspace,
    Place,
    TransferHeader,
    TransferKind,
)
from reprise_worker.metrics import WorkerMetrics
from reprise_worker.transfer import NoStore
from support.runner_driver import block_save
from support.transfer_bench import ADAPTERS, COPIES, FINGERPRINT, SESSION, Bench, hash_of, limits


@pytest.fixture(params=COPIES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(limits(), compiled=request.param)


def test_a_saved_block_loads_into_another(bench: Bench) -> None:
    assert bench.transfers.save([block_save(5, hash_of(1), generation=9)]) == 0
    bench.kv.keys[0][5].zero_()  # the next step may overwrite it at once
    (saved,) = bench.pump()
    assert saved.header.kind == TransferKind.SAVE
    assert saved.header.generation == 9
    assert saved.header.keyspace == Keyspace("test", FINGERPRINT)
    bench.answer(saved, TransferKind.SAVED, accepted=(True,))
    assert bench.metric("saves_total") == 1

    bench.load([6], [hash_of(1)])
    (asked,) = bench.pump()
    assert (asked.header.kind, asked.header.generation) == (TransferKind.LOAD, 3)
    bench.answer(asked, TransferKind.LOADED, saved.values)
    assert bench.reports == [LoadReport(7, 0)]
    assert bench.kv.keys[0][6].any()


def test_blocks_of_adapters_are_saved_and_asked_in_messages_of_their_own(bench: Bench) -> None:
    adapter_ids = (1, 1, 2, 0)
    bench.transfers.save(
        [block_save(5, hash_of(number), adapter_id=one) for number, one in enumerate(adapter_ids)]
    )
    sent = bench.pump()
    keyspaces = [Keyspace("test", FINGERPRINT, adapter) for adapter in (*ADAPTERS, "")]
    assert [one.header.keyspace for one in sent] == keyspaces
    assert [[key.block_hash for key in one.header.keys] for one in sent] == [
        [hash_of(0), hash_of(1)],
        [hash_of(2)],
        [hash_of(3)],
    ]
    for adapter_id in (2, 0):
        bench.load([6], [hash_of(9)], handle=adapter_id, adapter_id=adapter_id)
        (asked,) = bench.pump()
        assert asked.header.keyspace == keyspaces[adapter_id - 1]
        bench.answer(asked, TransferKind.LOADED, [b""])


@pytest.mark.parametrize("fp8", [False, True])
def test_a_value_of_another_adapter_or_of_the_model_is_foreign(fp8: bool) -> None:
    """Whoever stored it under that key: the hash is the same where only the content differs."""
    bench = Bench(limits(), fp8=fp8)
    values = []
    for adapter_id in range(3):
        bench.transfers.save([block_save(5, hash_of(1), adapter_id=adapter_id)])
        (saved,) = bench.pump()
        values += saved.values
        bench.answer(saved, TransferKind.SAVED, accepted=(True,))
    assert len(set(values)) == 3
    for adapter_id in range(3):
        for stored, value in enumerate(values):
            bench.load([6], [hash_of(1)], adapter_id=adapter_id)
            (asked,) = bench.pump()
            bench.answer(asked, TransferKind.LOADED, [value])
            assert bench.reports.pop().reason == ("" if stored == adapter_id else "foreign")


def test_every_transfer_is_measured_when_it_is_over(bench: Bench) -> None:
    bench.transfers.save([block_save(5, hash_of(1)), block_save(5, hash_of(2))])
    (saved,) = bench.pump()
    nbytes = len(bench.value(5, hash_of(1)))
    bench.now_s = 0.5
    bench.answer(saved, TransferKind.SAVED, accepted=(True, False))
    assert bench.saved == [TransferMeasure(2, nbytes, 0.5)]
    bench.load([6, 7], [hash_of(1), hash_of(2)])
    (asked,) = bench.pump()
    bench.now_s = 2.0
    bench.answer(asked, TransferKind.LOADED, [bench.value(5, hash_of(1)), b""])
    assert bench.loaded == [TransferMeasure(2, nbytes, 1.5)]
    bench.transfers.save([block_save(5, hash_of(3))])
    bench.pump()
    bench.now_s = 40.0
    bench.pump()
    assert bench.saved[1:] == [TransferMeasure(1, 0, 38.0)]


def test_loaded_bytes_are_the_saved_ones(bench: Bench) -> None:
    original = bench.kv.keys[0][5].clone()
    bench.transfers.save([block_save(5, hash_of(1))])
    (saved,) = bench.pump()
    assert saved.values == [bench.value(5, hash_of(1))]
    bench.load([6], [hash_of(1)])
    bench.answer(bench.pump()[0], TransferKind.LOADED, saved.values)
    assert torch.equal(bench.kv.keys[0][6], original)


def flip(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda value: b"", "missing"),
        (flip, "damaged"),
        (lambda value: value[:-4], "damaged"),
        (lambda value: value[:10], "damaged"),
        (lambda value: b"XXXX" + value[4:], "foreign"),
    ],
)
def test_a_bad_value_is_never_written(bench: Bench, change: Callable[[bytes], bytes], reason: str) -> None:
    good, bad = bench.value(1, hash_of(1)), change(bench.value(2, hash_of(2)))
    before = bench.kv.keys[0][21].clone()
    bench.load([20, 21], [hash_of(1), hash_of(2)])
    bench.answer(bench.pump()[0], TransferKind.LOADED, [good, bad])
    assert bench.reports == [LoadReport(7, 0, pack_ids([21]), reason)]
    assert torch.equal(bench.kv.keys[0][21], before)
    assert torch.equal(bench.kv.keys[0][20], bench.kv.keys[0][1])
    assert bench.metric("loads_failed_total", reason=reason) == 1


def test_another_models_block_and_another_keys_block_are_refused(bench: Bench) -> None:
    values = [bench.value(1, hash_of(1), fingerprint="cd" * 16), bench.value(2, hash_of(9))]
    bench.load([20, 21], [hash_of(1), hash_of(2)])
    bench.answer(bench.pump()[0], TransferKind.LOADED, values)
    assert unpack_ids(bench.reports[0].failed_block_ids) == [20, 21]


def test_a_refused_load_fails_as_a_whole(bench: Bench) -> None:
    bench.load([20, 21], [hash_of(1), hash_of(2)])
    bench.answer(bench.pump()[0], TransferKind.REFUSED, reason="generation")
    assert bench.reports == [LoadReport(7, 0, pack_ids([20, 21]), "refused")]


def test_a_late_answer_is_not_written(bench: Bench) -> None:
    before = bench.kv.keys[0][20].clone()
    bench.load([20], [hash_of(1)])
    (asked,) = bench.pump()
    assert bench.transfers.next_deadline_s() == 5.0
    bench.now_s = 5.0
    bench.pump()
    assert bench.reports == [LoadReport(7, 0, pack_ids([20]), "timeout")]
    bench.answer(asked, TransferKind.LOADED, [bench.value(1, hash_of(1))])
    assert len(bench.reports) == 1
    assert torch.equal(bench.kv.keys[0][20], before)


def test_a_store_that_is_away_fails_loads_in_time(bench: Bench) -> None:
    bench.connected = False
    bench.load([20], [hash_of(1)])
    assert bench.pump() == []
    assert bench.transfers.has_unsent
    bench.now_s = 5.0
    bench.pump()
    assert bench.reports == [LoadReport(7, 0, pack_ids([20]), "unavailable")]
    assert not bench.transfers.has_unsent


def test_a_new_session_drops_the_loads_of_the_old_one(bench: Bench) -> None:
    before = bench.kv.keys[0][20].clone()
    bench.load([20], [hash_of(1)])
    (asked,) = bench.pump()
    bench.load([22], [hash_of(2)])
    bench.transfers.begin_session(b"t" * 16)
    bench.answer(asked, TransferKind.LOADED, [bench.value(1, hash_of(1))])
    assert bench.pump() == []
    assert bench.reports == []
    assert torch.equal(bench.kv.keys[0][20], before)
    assert bench.metric("loads_pending") == 0


def test_full_staging_drops_and_counts(bench: Bench) -> None:
    bench.connected = False
    room = bench.transfers._staging.num_rows
    saves = [block_save(1, hash_of(number)) for number in range(room + 5)]
    assert bench.transfers.save(saves) == 5
    bench.pump()
    assert bench.transfers.save(saves[:1]) == 1
    assert bench.metric("saves_dropped_total", where="staging") == 6
    bench.connected = True
    bench.pump()  # four are sent, and their rows are free again
    assert bench.transfers.save(saves[:3]) == 0


def test_saves_in_flight_are_bounded_and_freed_by_answers_or_time(bench: Bench) -> None:
    bench.transfers.save([block_save(1, hash_of(number)) for number in range(6)])
    (first,) = bench.pump()
    assert len(first.values) == 4
    assert bench.pump() == []
    bench.answer(first, TransferKind.SAVED, accepted=(True, True, False, True))
    assert bench.metric("saves_total") == 3
    assert bench.metric("saves_dropped_total", where="store") == 1
    (second,) = bench.pump()
    assert len(second.values) == 2
    bench.now_s = 30.0
    bench.pump()
    assert bench.metric("saves_failed_total", reason="timeout") == 2
    bench.answer(second, TransferKind.SAVED, accepted=(True, True))  # too late to count
    assert bench.metric("saves_total") == 3


def test_one_message_carries_one_generation(bench: Bench) -> None:
    generations = [1, 1, 2, 1]
    bench.transfers.save(
        [block_save(1, hash_of(index), generation=value) for index, value in enumerate(generations)]
    )
    assert [(sent.header.generation, len(sent.values)) for sent in bench.pump()] == [(1, 2), (2, 1), (1, 1)]


def test_a_long_load_goes_in_pieces_within_its_limit(bench: Bench) -> None:
    hashes = [hash_of(number) for number in range(70)]
    bench.load(range(20, 90), hashes)
    first, second = bench.pump()
    assert [len(sent.header.keys) for sent in (first, second)] == [64, 2]
    bench.answer(first, TransferKind.LOADED, [bench.value(1, block_hash) for block_hash in hashes[:64]])
    assert bench.reports == []
    (third,) = bench.pump()
    bench.answer(second, TransferKind.LOADED, [b""] * 2)
    bench.answer(third, TransferKind.LOADED, [bench.value(3, block_hash) for block_hash in hashes[66:]])
    assert bench.reports == [LoadReport(7, 0, pack_ids([84, 85]), "missing")]


def share(bench: Bench, *values: bytes) -> tuple[Place, ...]:
    """The store's memory with these values in it; the worker may read it."""
    memory = make_memory("test-store", 64 * 1024)
    bench.transfers.store_arrived(memory)
    places, offset = [], 0
    for value in values:
        os.pwrite(memory.fd, value, offset)
        places.append(Place(offset, len(value)))
        offset += len(value)
    return tuple(places)


def test_values_in_place_are_copied_checked_and_released(bench: Bench) -> None:
    places = share(bench, bench.value(1, hash_of(1)), bench.value(2, hash_of(2)))
    frame = bench.value(3, hash_of(3))
    bench.load([20, 21, 22, 23], [hash_of(number) for number in (1, 2, 3, 4)])
    (asked,) = bench.pump()
    mixed = (*places, Place(-1, len(frame)), Place(0, 0))
    bench.answer(asked, TransferKind.LOADED, [frame], places=mixed)
    assert bench.reports == [LoadReport(7, 0, pack_ids([23]), "missing")]
    assert all(torch.equal(bench.kv.keys[0][20 + i], bench.kv.keys[0][1 + i]) for i in range(3))
    (release,) = bench.pump()
    assert release.header.kind == TransferKind.RELEASE
    assert release.header.released == (asked.header.transfer_id,)
    assert bench.pump() == []


def test_answers_of_one_burst_are_released_together(bench: Bench) -> None:
    places = share(bench, *(bench.value(1, hash_of(number)) for number in range(6)))
    for number in range(6):
        bench.load([20 + number], [hash_of(number)], handle=number)
        if number in (2, 5):  # three loads may wait at the same time
            asked = bench.pump()
            for sent, place in zip(asked[:-1], places[number - 2 :], strict=False):
                bench.answer(sent, TransferKind.LOADED, places=(place,))
                assert bench.pump() == []
            bench.answer(asked[-1], TransferKind.LOADED, places=(places[number],))
            (release,) = bench.pump()
            assert release.header.released == tuple(sent.header.transfer_id for sent in asked)
    assert bench.reports == [LoadReport(number, 0) for number in range(6)]


def test_a_place_that_was_given_to_another_value_is_refused(bench: Bench) -> None:
    """As after a lease has run out: the bytes there are a good block, of another hash."""
    (place,) = share(bench, bench.value(2, hash_of(2)))
    bench.load([20], [hash_of(1)])
    bench.answer(bench.pump()[0], TransferKind.LOADED, places=(place,))
    assert bench.reports == [LoadReport(7, 0, pack_ids([20]), "damaged")]


@pytest.mark.parametrize(
    ("place", "reason"),
    [(Place(1 << 30, 576), "damaged"), (Place(1, 576), "foreign"), (Place(0, 575), "damaged")],
)
def test_a_place_that_is_no_block_is_refused(bench: Bench, place: Place, reason: str) -> None:
    share(bench, bench.value(1, hash_of(1)))
    bench.load([20], [hash_of(1)])
    bench.answer(bench.pump()[0], TransferKind.LOADED, places=(place,))
    assert bench.reports == [LoadReport(7, 0, pack_ids([20]), reason)]


def test_a_late_answer_by_place_is_released_and_not_written(bench: Bench) -> None:
    before = bench.kv.keys[0][20].clone()
    (place,) = share(bench, bench.value(1, hash_of(1)))
    bench.load([20], [hash_of(1)])
    (asked,) = bench.pump()
    bench.now_s = 5.0
    bench.pump()
    bench.answer(asked, TransferKind.LOADED, places=(place,))
    assert torch.equal(bench.kv.keys[0][20], before)
    assert bench.pump()[0].header.released == (asked.header.transfer_id,)


def test_rows_that_the_store_reads_are_kept_until_its_answer(bench: Bench) -> None:
    share(bench)
    bench.transfers.save([block_save(5, hash_of(1)), block_save(6, hash_of(2))])
    (saved,) = bench.pump()
    assert saved.values == []
    memory = bench.transfers.staging_memory
    assert memory is not None
    values = [os.pread(memory.fd, place.nbytes, place.offset) for place in saved.header.places]
    assert values == [bench.value(5, hash_of(1)), bench.value(6, hash_of(2))]
    assert bench.metric("staging_blocks_used") == 2
    bench.answer(saved, TransferKind.SAVED, accepted=(True, False))
    assert bench.metric("staging_blocks_used") == 0


@pytest.mark.parametrize("shared", [True, False])
def test_blocks_in_8_bits_come_back_nearly_the_same(shared: bool) -> None:
    """The first attempt finds nobody: the block must not be encoded twice."""
    bench = Bench(limits(), connected=False, fp8=True)
    if shared:
        share(bench)
    bench.transfers.save([block_save(5, hash_of(1))])
    bench.pump()
    bench.connected = True
    (saved,) = bench.pump()
    if shared:
        (place,) = saved.header.places
        assert bench.transfers.staging_memory is not None
        value = os.pread(bench.transfers.staging_memory.fd, place.nbytes, place.offset)
    else:
        (value,) = saved.values
    assert len(value) == 64 + bench.kv.block_nbytes // 4 + 8
    bench.load([20], [hash_of(1)])
    (asked,) = bench.pump()
    if shared:
        bench.answer(asked, TransferKind.LOADED, places=share(bench, value))
    else:
        bench.answer(asked, TransferKind.LOADED, [value])
    assert bench.reports == [LoadReport(7, 0)]
    assert torch.allclose(bench.kv.keys[0][20], bench.kv.keys[0][5], rtol=1 / 16, atol=1e-3)
    # A block that was stored in full is of another format.
    bench.load([21], [hash_of(2)])
    asked, *_ = bench.pump()
    bench.answer(asked, TransferKind.LOADED, [bench.value(2, hash_of(2))])
    assert bench.reports[-1].reason == "foreign"


def test_a_store_that_leaves_ends_what_it_was_asked(bench: Bench) -> None:
    share(bench)
    bench.transfers.save([block_save(5, hash_of(1))])
    bench.load([20, 21], [hash_of(1), hash_of(2)])
    bench.pump()
    bench.transfers.store_left()
    assert bench.reports == [LoadReport(7, 0, pack_ids([20, 21]), "unavailable")]
    assert bench.metric("saves_failed_total", reason="unavailable") == 1
    assert bench.metric("staging_blocks_used") == bench.metric("store_memory_shared") == 0


def test_too_many_loads_fail_at_once(bench: Bench) -> None:
    for handle in range(5):
        bench.load([20 + handle], [hash_of(handle)], handle=handle)
    assert [(report.handle, report.reason) for report in bench.reports] == [
        (3, "unavailable"),
        (4, "unavailable"),
    ]
    assert bench.metric("loads_pending") == 3


@pytest.mark.parametrize("kind", ["save", "load", "nonsense"])
def test_what_a_store_never_says_is_malformed(bench: Bench, kind: str) -> None:
    with pytest.raises(DataLoss):
        bench.transfers.receive(TransferHeader(TRANSFER_VERSION, kind, 1), [])


@pytest.mark.parametrize("numbers", [(2, 1), (1,), (1, 2, 3)])
def test_values_in_another_order_or_number_are_refused(bench: Bench, numbers: tuple[int, ...]) -> None:
    bench.load([20, 21], [hash_of(1), hash_of(2)])
    (asked,) = bench.pump()
    bench.answer(asked, TransferKind.LOADED, [bench.value(1, hash_of(number)) for number in numbers])
    assert bench.reports == [LoadReport(7, 0, pack_ids([20, 21]), "damaged")]


def test_without_a_store_saves_are_dropped_and_loads_fail() -> None:
    reports: list[tuple[bytes, TransferReport]] = []
    metrics = WorkerMetrics(CollectorRegistry())
    no_store = NoStore(metrics, lambda session, ended: reports.append((session, ended)))
    no_store.begin_session(SESSION)
    assert no_store.save([block_save(1, hash_of(1))]) == 1
    no_store.load([BlockLoad(4, 0, pack_ids([9]), (hash_of(1),), 0)])
    failed = LoadReport(4, 0, pack_ids([9]), "unavailable")
    assert reports == [(SESSION, TransferReport((failed,)))]
