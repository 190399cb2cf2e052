"""Rows of host memory for blocks on their way to the store: each a header and a block.

On a CPU the rows lie in memory that a store of this machine may read. On CUDA they are pinned, which such
memory is not, and values travel as messages.
"""

import mmap
import os
import threading

import torch

from reprise_runtime.logs import LimitedLog, get_logger
from reprise_runtime.shared_memory import Memory, make_memory
from reprise_wire.block_codec import HEADER_NBYTES
from reprise_wire.block_transfer import Place

log = get_logger()


class Staging:
    """Any thread may call. A row belongs to who took it until `give_back`."""

    def __init__(self, block_nbytes: int, *, staging_bytes: int, pinned: bool, shared: bool) -> None:
        self._block_nbytes = block_nbytes
        self._row_nbytes = -(-(HEADER_NBYTES + block_nbytes) // 64) * 64
        self.num_rows = max(1, staging_bytes // self._row_nbytes)
        self.memory: Memory | None = None
        """What of it a store may read; None: nothing."""
        rows = self._share() if shared and not pinned else None
        if rows is None:
            rows = torch.empty((self.num_rows, self._row_nbytes), dtype=torch.uint8, pin_memory=pinned)
        self._rows = rows
        self._bytes = rows.numpy()
        self._lock = threading.Lock()
        self._free = list(reversed(range(self.num_rows)))  # the lowest first: few rows are ever touched
        self._num_touched = 0
        self._limited = LimitedLog()

    @property
    def num_used(self) -> int:
        return self.num_rows - len(self._free)

    def take(self) -> int | None:
        """A row, or None when all are in use (or the system has no more memory)."""
        with self._lock:
            if not self._free or not self._touch(self._free[-1]):
                return None
            return self._free.pop()

    def give_back(self, rows: list[int]) -> None:
        with self._lock:
            self._free += rows

    def block(self, row: int) -> torch.Tensor:
        """(block_nbytes,) uint8, in host memory."""
        return self._rows[row, HEADER_NBYTES : HEADER_NBYTES + self._block_nbytes]

    def value(self, row: int, payload_nbytes: int) -> memoryview:
        """The header, and as much as is to be stored."""
        return self._bytes[row, : HEADER_NBYTES + payload_nbytes].data

    def place(self, row: int, payload_nbytes: int) -> Place:
        return Place(row * self._row_nbytes, HEADER_NBYTES + payload_nbytes)

    def _share(self) -> torch.Tensor | None:
        nbytes = self.num_rows * self._row_nbytes
        try:
            memory = make_memory("reprise-worker", nbytes)
            mapped = mmap.mmap(memory.fd, nbytes)
        except OSError as error:
            log.warning("no shared memory; saves go through the socket", error=str(error))
            return None
        self.memory = memory
        return torch.frombuffer(mapped, dtype=torch.uint8).view(self.num_rows, self._row_nbytes)

    def _touch(self, row: int) -> bool:
        """Gets a row's pages before they are written, so that a lack of memory is no signal."""
        if self.memory is None or row < self._num_touched:
            return True
        try:
            os.posix_fallocate(self.memory.fd, row * self._row_nbytes, self._row_nbytes)
        except OSError as error:
            self._limited.warning(log, "no memory for a staged block", error=str(error))
            return False
        self._num_touched = row + 1
        return True
