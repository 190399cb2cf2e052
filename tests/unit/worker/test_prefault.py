"""Pages taken ahead of use: all of them, in pieces, and without a change to what is there."""

import ctypes
import mmap
import sys
import threading

import numpy as np
import pytest

from reprise_worker.prefault import CHUNK_NBYTES, prefault

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise of Linux alone")
NBYTES = 3 * CHUNK_NBYTES + 5 * mmap.PAGESIZE


def fresh_memory() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)


def num_resident_pages(memory: np.ndarray) -> int:
    pages = (ctypes.c_ubyte * (memory.nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(memory.nbytes)
    assert libc.mincore(ctypes.c_void_p(memory.ctypes.data), length, pages) == 0
    return sum(page & 1 for page in pages)


def test_every_page_is_there_and_what_was_written_stays() -> None:
    memory, steps = fresh_memory(), list[int]()
    memory[123] = 7
    assert num_resident_pages(memory) < NBYTES // mmap.PAGESIZE
    assert prefault(memory, stopping=threading.Event(), on_progress=steps.append)
    assert num_resident_pages(memory) == NBYTES // mmap.PAGESIZE
    assert steps == [CHUNK_NBYTES, 2 * CHUNK_NBYTES, 3 * CHUNK_NBYTES, NBYTES]
    assert memory[123] == 7
    assert np.count_nonzero(memory) == 1


def test_it_ends_when_told() -> None:
    memory, stopping = fresh_memory(), threading.Event()
    assert prefault(memory, stopping=stopping, on_progress=lambda nbytes: stopping.set())
    assert num_resident_pages(memory) <= 2 * CHUNK_NBYTES // mmap.PAGESIZE


def test_a_part_that_begins_within_a_page_stays_within_its_pages() -> None:
    memory = fresh_memory()
    assert prefault(memory[100 : 100 + 3 * mmap.PAGESIZE], stopping=threading.Event())
    assert 2 <= num_resident_pages(memory) < NBYTES // mmap.PAGESIZE


def test_what_cannot_be_had_is_told() -> None:
    gone = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    memory = np.frombuffer(gone, dtype=np.uint8)
    assert not prefault(memory, stopping=threading.Event())
