"""Memory that processes of one machine share: sealed memfds, handed over a Unix socket.

It has no name in any file system: nothing is left behind when a process is killed, and neither the size of
/dev/shm nor a shared mount matters. Whoever gets a descriptor reads it like a file (`read_into`) and never
maps it, so no peer can end this process by SIGBUS. The socket stays open for as long as the memory is
shared; the kernel closes it when a process dies, which the other one sees at once.

    worker connects -> token, size of its memory, and its descriptor (none: it shares nothing)
    store           -> size of its memory, and its descriptor; or closes, when it does not know the token
"""

import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TOKEN_NBYTES = 16
_JOIN = struct.Struct(f"<{TOKEN_NBYTES}sQ")
_JOINED = struct.Struct("<Q")
_PEER_CREDENTIALS = struct.Struct("3i")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Memory:
    """A descriptor, and how much lies behind it. Closed when its last holder lets go, so that no thread
    that still reads can meet another file under the same number."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class JoinRequest:
    token: bytes
    memory: Memory | None


def make_memory(name: str, nbytes: int) -> Memory:
    """Zeroed, of fixed size; pages come when they are first written. Raises OSError where there is none."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    memory = Memory(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), nbytes)
    os.ftruncate(memory.fd, nbytes)
    fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, _SEALS)
    return memory


def read_into(memory: Memory, offset: int, targets: Sequence[Any]) -> None:
    """Fills the targets (writable buffers) one after another. Raises OSError when there is too little."""
    wanted = sum(memoryview(target).nbytes for target in targets)
    got = os.preadv(memory.fd, targets, offset)
    if got != wanted:
        raise OSError(errno.EIO, f"{got} of {wanted} bytes at {offset} in memory of {memory.nbytes} bytes")


def listen(address: str) -> socket.socket:
    """`address` is a path, or @NAME for one without a file. Non-blocking. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if not address.startswith("@"):
            _remove_left_over(address)
        listener.bind(_to_system(address))
        listener.listen()
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def join(
    address: str, token: bytes, memory: Memory | None, *, timeout_s: float
) -> tuple[socket.socket, Memory]:
    """The worker's side: the connection to keep open, and the store's memory.

    Raises OSError when the store is not on this machine, or will not share.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(_to_system(address))
        size, fds = (memory.nbytes, [memory.fd]) if memory is not None else (0, [])
        socket.send_fds(connection, [_JOIN.pack(token, size)], fds)
        answer, theirs = _receive(connection, _JOINED.size)
        if theirs is None or len(answer) != _JOINED.size:
            raise OSError(errno.ECONNREFUSED, f"{address} does not share its memory")
        theirs.nbytes = _JOINED.unpack(answer)[0]
        _check(theirs)
    except OSError:
        connection.close()
        raise
    return connection, theirs


def receive_join(connection: socket.socket) -> JoinRequest:
    """The store's side; the connection has something to read. Raises OSError for what is no request, or
    comes from another user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
    if uid not in (os.geteuid(), 0):
        raise OSError(errno.EPERM, f"user {uid} is neither ours nor root")
    message, memory = _receive(connection, _JOIN.size)
    if len(message) != _JOIN.size:
        raise OSError(errno.EBADMSG, f"{len(message)} bytes, must be {_JOIN.size}")
    token, nbytes = _JOIN.unpack(message)
    if memory is not None:
        memory.nbytes = nbytes
        _check(memory)
    return JoinRequest(token, memory)


def accept_join(connection: socket.socket, memory: Memory) -> None:
    """Hands out a descriptor that can only be read."""
    read_only = Memory(os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC), memory.nbytes)
    socket.send_fds(connection, [_JOINED.pack(memory.nbytes)], [read_only.fd])


def _receive(connection: socket.socket, nbytes: int) -> tuple[bytes, Memory | None]:
    message, fds, _, _ = socket.recv_fds(connection, nbytes, 4)
    memories = [Memory(fd, 0) for fd in fds]
    return message, memories[0] if len(memories) == 1 else None


def _check(memory: Memory) -> None:
    """Reads of it must end at once whatever the peer does: so a regular file, as long as it says."""
    status = os.fstat(memory.fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size < memory.nbytes:
        raise OSError(errno.EBADMSG, f"a descriptor of {status.st_size} bytes, not memory of {memory.nbytes}")


def _remove_left_over(path: str) -> None:
    """A socket file that nobody listens on any more, of a process that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return  # not there, or nothing of ours: bind tells


def _to_system(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address
