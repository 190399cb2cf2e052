"""Loads of what the index of the store's memory names: nobody is asked, and nothing wrong is served."""

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reprise_core.ids import BlockHash
from reprise_core.steps import LoadReport, pack_ids
from reprise_runtime.shared_memory import make_memory
from reprise_wire.block_codec import HEADER_NBYTES
from reprise_wire.block_transfer import BlockKey, Keyspace, Place, TransferKind, redis_key
from reprise_wire.host_index import BUCKET_NBYTES, HostIndex
from reprise_worker.block_fills import BlockFills
from support.runner_driver import block_save
from support.transfer_bench import ADAPTERS, COPIES, FINGERPRINT, Bench, hash_of, limits

VALUES_NBYTES = 128 * 1024
INDEX_NBYTES = 64 * BUCKET_NBYTES
GENERATION = 3
"""That of the bench's loads."""


def name_of(block_hash: BlockHash, *, generation: int = GENERATION, adapter: str = "") -> str:
    return redis_key(Keyspace("test", FINGERPRINT, adapter), generation, BlockKey(0, 0, block_hash))


class SharingStore:
    """Its memory and what the index says of it."""

    def __init__(self, bench: Bench) -> None:
        self.memory = make_memory("test-store", VALUES_NBYTES + INDEX_NBYTES)
        self._map = mmap.mmap(self.memory.fd, self.memory.nbytes)
        self.index = HostIndex(memoryview(self._map)[VALUES_NBYTES:])
        self._end = 0
        view = self.memory.view(VALUES_NBYTES, INDEX_NBYTES)
        bench.transfers.store_arrived(self.memory, HostIndex(view))

    def keep(self, name: str, value: bytes) -> Place:
        place = Place(self._end, len(value))
        self.write(place, value)
        self.index.put(name, place)
        self._end += len(value)
        return place

    def write(self, place: Place, value: bytes) -> None:
        self._map[place.offset : place.offset + len(value)] = value


@pytest.fixture(params=COPIES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(limits(), compiled=request.param)


@pytest.fixture
def store(bench: Bench) -> SharingStore:
    return SharingStore(bench)


def holds(bench: Bench, block: int, source: int) -> bool:
    return torch.equal(bench.kv.keys[0][block], bench.kv.keys[0][source])


def test_what_is_there_is_read_and_the_rest_is_asked_for(bench: Bench, store: SharingStore) -> None:
    for number in (1, 3):
        store.keep(name_of(hash_of(number)), bench.value(number, hash_of(number)))
    bench.load([20, 21, 22, 23], [hash_of(number) for number in (1, 2, 3, 4)])
    asked, told = bench.pump()
    assert (asked.header.kind, told.header.kind) == (TransferKind.LOAD, TransferKind.READ)
    assert [key.block_hash for key in asked.header.keys] == [hash_of(2), hash_of(4)]
    assert [key.block_hash for key in told.header.keys] == [hash_of(1), hash_of(3)]
    assert told.header.generation == GENERATION
    assert not bench.reports
    bench.answer(asked, TransferKind.LOADED, [bench.value(2, hash_of(2)), b""])
    assert bench.reports == [LoadReport(7, 0, pack_ids([23]), "missing")]
    assert all(holds(bench, 19 + number, number) for number in (1, 2, 3))
    assert (bench.metric("loads_total"), bench.metric("loads_by_index_total")) == (3, 2)


def test_a_load_that_is_all_there_ends_without_an_answer(bench: Bench, store: SharingStore) -> None:
    value = bench.value(1, hash_of(1))
    store.keep(name_of(hash_of(1)), value)
    bench.load([20], [hash_of(1)])
    (told,) = bench.pump()
    assert told.header.kind == TransferKind.READ
    assert bench.reports == [LoadReport(7, 0)]
    assert (bench.loaded[0].num_blocks, bench.loaded[0].num_bytes) == (1, len(value))
    assert bench.pump() == []
    assert bench.metric("loads_pending") == 0


def another_value(bench: Bench, store: SharingStore, place: Place) -> None:
    store.write(place, bench.value(2, hash_of(2)))


def another_models_value(bench: Bench, store: SharingStore, place: Place) -> None:
    store.write(place, bench.value(1, hash_of(1), fingerprint="ee" * 16))


def half_of_another_value(bench: Bench, store: SharingStore, place: Place) -> None:
    middle = place.offset + place.nbytes // 2
    store.write(Place(middle, 0), bench.value(2, hash_of(1))[place.nbytes // 2 :])


def a_flipped_bit(bench: Bench, store: SharingStore, place: Place) -> None:
    store.write(Place(place.offset + HEADER_NBYTES + 5, 1), b"\xff")


def beyond_the_memory(bench: Bench, store: SharingStore, place: Place) -> None:
    store.index.put(name_of(hash_of(1)), Place(1 << 40, place.nbytes))


def across_the_end(bench: Bench, store: SharingStore, place: Place) -> None:
    store.index.put(name_of(hash_of(1)), Place(store.memory.nbytes - 100, place.nbytes))


def of_no_length(bench: Bench, store: SharingStore, place: Place) -> None:
    store.index.put(name_of(hash_of(1)), Place(place.offset, 0))


def too_short(bench: Bench, store: SharingStore, place: Place) -> None:
    store.index.put(name_of(hash_of(1)), Place(place.offset, place.nbytes - 1))


Spoil = Callable[[Bench, SharingStore, Place], None]


@pytest.mark.parametrize(
    "spoil",
    [
        another_value,
        another_models_value,
        half_of_another_value,
        a_flipped_bit,
        beyond_the_memory,
        across_the_end,
        of_no_length,
        too_short,
    ],
)
def test_what_is_not_the_block_is_asked_for(bench: Bench, store: SharingStore, spoil: Spoil) -> None:
    right = bench.value(1, hash_of(1))
    spoil(bench, store, store.keep(name_of(hash_of(1)), right))
    bench.load([20], [hash_of(1)])
    (asked,) = bench.pump()
    assert asked.header.kind == TransferKind.LOAD
    assert not bench.reports
    bench.answer(asked, TransferKind.LOADED, [right])
    assert bench.reports == [LoadReport(7, 0)]
    assert holds(bench, 20, 1)
    assert bench.metric("loads_by_index_total") == 0


def test_a_block_that_leaves_while_it_is_copied_is_asked_for(
    bench: Bench, store: SharingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came into its place may be the block of another group with the same hash: no checksum tells."""
    name = name_of(hash_of(1))
    place = store.keep(name, bench.value(1, hash_of(1)))
    store.write(place, bench.value(2, hash_of(1)))
    fill = BlockFills.fill

    def fill_and_leave(fills: BlockFills, *arguments: Any, **more: Any) -> list[str]:
        wrong = fill(fills, *arguments, **more)
        store.index.remove(name)
        return wrong

    monkeypatch.setattr(BlockFills, "fill", fill_and_leave)
    bench.load([20], [hash_of(1)])
    (asked,) = bench.pump()
    assert asked.header.kind == TransferKind.LOAD


def test_another_generation_is_another_block(bench: Bench, store: SharingStore) -> None:
    store.keep(name_of(hash_of(1), generation=GENERATION - 1), bench.value(1, hash_of(1)))
    bench.load([20], [hash_of(1)])
    (asked,) = bench.pump()
    assert asked.header.kind == TransferKind.LOAD
    bench.answer(asked, TransferKind.REFUSED, reason="generation")
    assert bench.reports == [LoadReport(7, 0, pack_ids([20]), "refused")]


@pytest.mark.parametrize("fp8", [False, True])
def test_an_adapters_block_is_found_under_its_own_name(fp8: bool) -> None:
    bench = Bench(limits(), fp8=fp8)
    bench.transfers.save([block_save(1, hash_of(1), adapter_id=1)])
    (saved,) = bench.pump()
    store = SharingStore(bench)
    store.keep(name_of(hash_of(1), adapter=ADAPTERS[0]), saved.values[0])
    for handle, (block, adapter_id) in enumerate([(20, 1), (21, 2), (22, 0)]):
        bench.load([block], [hash_of(1)], handle=handle, adapter_id=adapter_id)
    kinds = {}
    while bench.transfers.has_unread or not kinds:
        kinds |= {sent.header.keyspace: sent.header.kind for sent in bench.pump()}
    assert kinds == {
        Keyspace("test", FINGERPRINT, ADAPTERS[0]): TransferKind.READ,
        Keyspace("test", FINGERPRINT, ADAPTERS[1]): TransferKind.LOAD,
        Keyspace("test", FINGERPRINT): TransferKind.LOAD,
    }
    assert bench.reports == [LoadReport(0, 0)]
    assert torch.allclose(bench.kv.keys[0][20], bench.kv.keys[0][1], atol=0.2 if fp8 else 0)


def long_load(bench: Bench, store: SharingStore) -> None:
    """Of 70 blocks, of which a turn reads 64."""
    bench.transfers._loads._max_blocks_at_once = 64
    for number in range(70):
        store.keep(name_of(hash_of(number)), bench.value(1, hash_of(number)))
    bench.load(range(20, 90), [hash_of(number) for number in range(70)])
    assert bench.pump() == []
    assert bench.transfers.has_unread
    assert not bench.reports


def test_a_long_load_is_read_in_pieces_and_told_at_the_end(bench: Bench, store: SharingStore) -> None:
    long_load(bench, store)
    told = bench.pump()
    assert [(sent.header.kind, len(sent.header.keys)) for sent in told] == [
        (TransferKind.READ, 64),
        (TransferKind.READ, 6),
    ]
    assert bench.reports == [LoadReport(7, 0)]
    assert not bench.transfers.has_unread


def test_a_load_whose_time_is_up_is_read_no_further(bench: Bench, store: SharingStore) -> None:
    long_load(bench, store)
    before = bench.kv.keys[0][84].clone()
    bench.now_s = 5.0
    bench.pump()
    assert bench.reports == [LoadReport(7, 0, pack_ids(range(84, 90)), "unavailable")]
    assert torch.equal(bench.kv.keys[0][84], before)


def test_what_a_store_that_left_had_is_asked_of_the_next_one(bench: Bench, store: SharingStore) -> None:
    long_load(bench, store)
    bench.transfers.store_left()
    assert not bench.transfers.has_unread
    bench.transfers.store_arrived()
    asked = next(sent for sent in bench.pump() if sent.header.kind == TransferKind.LOAD)
    assert [key.block_hash for key in asked.header.keys] == [hash_of(number) for number in range(64, 70)]
    bench.answer(asked, TransferKind.LOADED, [b""] * 6)
    assert bench.reports == [LoadReport(7, 0, pack_ids(range(84, 90)), "missing")]


def test_a_new_session_ends_what_is_being_read(bench: Bench, store: SharingStore) -> None:
    long_load(bench, store)
    before = bench.kv.keys[0][84].clone()
    bench.transfers.begin_session(b"t" * 16)
    assert all(sent.header.kind == TransferKind.READ for sent in bench.pump())
    assert not bench.reports
    assert not bench.transfers.has_unread
    assert torch.equal(bench.kv.keys[0][84], before)


def test_what_was_read_is_told_once_if_at_all(bench: Bench, store: SharingStore) -> None:
    store.keep(name_of(hash_of(1)), bench.value(1, hash_of(1)))
    bench.connected = False
    bench.load([20], [hash_of(1)])
    assert bench.pump() == []
    assert bench.reports == [LoadReport(7, 0)]
    bench.connected = True
    assert bench.pump() == []
