"""Values into blocks of the cache, each checked.

A value in shared memory is copied first and checked after, because its place may be given to another value at
any time; so a block that failed may hold anything. A value in a message is checked first.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reprise_core.ids import BlockHash
from reprise_runtime.shared_memory import Memory, read_into
from reprise_wire.block_codec import (
    HEADER_NBYTES,
    BadBlock,
    BlockFormat,
    check_header,
    check_payload,
    decode_block,
)
from reprise_worker._accel import native_copy
from reprise_worker.fp8_values import Fp8Values
from reprise_worker.kv_cache import KvCache
from reprise_worker.store_wire import Frame

BYTES_PER_LOCK = 1024 * 1024
"""Copied while nobody else may have the lock (some 0.1 ms), unless one block is longer."""


class Target(NamedTuple):
    """Where a value is in shared memory (offset below 0: in the next frame; length 0: nowhere), the block
    that it is for, and what that is to hold."""

    offset: int
    nbytes: int
    block_id: int
    block_hash: BlockHash


class BlockFills:
    """The lock guards `session`, and is held while a block is written: nothing of a session is written after
    it has ended."""

    def __init__(self, kv: KvCache, formats: Sequence[BlockFormat], fp8: Fp8Values | None) -> None:
        """`formats`: of values, by adapter id."""
        self.lock = threading.Lock()
        self.session = b""
        self._kv = kv
        self._formats = formats
        self._fp8 = fp8
        # Compiled, many blocks are copied at once; into the cache itself alone.
        self._native = native_copy() if kv.host_memory is not None and fp8 is None else None
        self._blocks_per_lock = max(1, BYTES_PER_LOCK // kv.block_nbytes)

    def fill(
        self,
        session: bytes,
        targets: Sequence[Target],
        *,
        adapter_id: int,
        memory: Memory | None,
        frames: Sequence[Frame] = (),
    ) -> list[str]:
        """Per target what was wrong: missing, damaged, foreign, or stale (the session is over); nothing when
        the block holds what it should. `memory`: the store's, if it shares any."""
        format, rest = self._formats[adapter_id], iter(frames)
        right = self._copy(session, targets, format, memory)
        return [
            "" if done else self._try(session, target, format, memory, rest)
            for done, target in zip(right, targets, strict=True)
        ]

    def _copy(
        self, session: bytes, targets: Sequence[Target], format: BlockFormat, memory: Memory | None
    ) -> bytes:
        """Per target 1 when the block holds what it should now. `_fill` does the same one by one, and knows
        what is wrong."""
        native, right = self._native, b""
        if native is None or memory is None:
            return bytes(len(targets))
        for first in range(0, len(targets), self._blocks_per_lock):
            piece = tuple(targets[first : first + self._blocks_per_lock])
            with self.lock:
                if session != self.session:
                    return bytes(len(targets))
                right += native.copy_blocks(
                    memory.map(),
                    memory.nbytes,
                    self._kv.address,
                    self._kv.block_nbytes,
                    self._kv.num_blocks,
                    format.fields,
                    piece,
                )
        return right

    def _try(
        self,
        session: bytes,
        target: Target,
        format: BlockFormat,
        memory: Memory | None,
        rest: Iterator[Frame],
    ) -> str:
        try:
            if not target.nbytes:
                raise BadBlock("missing", "no tier of the store has it")
            if target.offset < 0:
                payload = decode_block(next(rest), block_hash=target.block_hash, format=format)
                self._write(session, target.block_id, payload)
            elif memory is None:
                raise BadBlock("damaged", "a place in memory that is not shared")
            else:
                self._fill(session, target, format, memory)
        except BadBlock as error:
            return error.reason
        except OSError:
            return "damaged"  # a place that is not in the memory
        return ""

    def _fill(self, session: bytes, target: Target, format: BlockFormat, memory: Memory) -> None:
        header = bytes(memory.view(target.offset, HEADER_NBYTES))
        check_header(header, format=format, value_nbytes=target.nbytes)
        block = self._kv.block_memory(target.block_id) if self._fp8 is None else None
        payload = block if block is not None else memoryview(bytearray(format.payload_nbytes))
        with self.lock:
            self._check_session(session)
            read_into(memory, target.offset + HEADER_NBYTES, payload)
        check_payload(header, payload, block_hash=target.block_hash)
        if block is None:
            self._write(session, target.block_id, payload)

    def _write(self, session: bytes, block_id: int, payload: memoryview) -> None:
        """A payload that was checked."""
        data = payload if self._fp8 is None else self._fp8.decode(payload)
        with self.lock:
            self._check_session(session)
            self._kv.import_block(block_id, data)

    def _check_session(self, session: bytes) -> None:
        """The caller holds the lock and is about to write."""
        if session != self.session:
            raise BadBlock("stale", "its session is over")
