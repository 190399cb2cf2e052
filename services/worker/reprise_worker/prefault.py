"""Pages of the KV cache, taken from the system before a request has to wait for them.

Memory is handed out, and cleared, when it is first written. Blocks are used in turn, so until the whole pool
was used once every request pays for the pages of its blocks: more than a load from the store costs.
"""

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

CHUNK_NBYTES = 4 * 1024 * 1024
_MADV_POPULATE_WRITE = 23  # Linux 5.14; changes no content, so whoever writes meanwhile is not disturbed
_libc = ctypes.CDLL(None, use_errno=True)


def prefault(
    memory: np.ndarray, *, stopping: threading.Event, on_progress: Callable[[int], None] = lambda nbytes: None
) -> bool:
    """Takes the pages of `memory` (contiguous) bit by bit, resting as long as it works, until `stopping` is
    set. False where the system cannot or has no more; then they come at first touch, as ever."""
    if not sys.platform.startswith("linux"):
        return False
    start = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for address in range(start, end, CHUNK_NBYTES):
        nbytes = min(CHUNK_NBYTES, end - address)
        began_s = time.monotonic()
        if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE):
            return False
        on_progress(address + nbytes - start)
        if stopping.wait(time.monotonic() - began_s):
            return True
    return True
