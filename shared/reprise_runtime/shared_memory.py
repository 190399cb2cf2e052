"""Memory that processes of one machine share: sealed memfds, handed over a Unix socket.

It has no name in any file system: nothing is left behind when a process is killed, and neither the size of
/dev/shm nor a shared mount matters. Whoever gets a descriptor maps it to read (`read_into`; twice as fast as
reading it like a file), after it has seen the seal against shrinking, so no peer can end this process by
SIGBUS. The socket stays open for as long as the memory is shared; the kernel closes it when a process dies,
which the other one sees at once.

    worker connects -> token, size of its memory, and its descriptor (none: it shares nothing)
    store           -> size of its memory, and its descriptor; or closes, when it does not know the token

After that it carries whatever messages the two have about the memory.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
from dataclasses import dataclass

TOKEN_NBYTES = 16
MAX_MESSAGE_NBYTES = 128 * 1024
_JOIN = struct.Struct(f"<{TOKEN_NBYTES}sQ")
_JOINED = struct.Struct("<Q")
_PEER_CREDENTIALS = struct.Struct("3i")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Memory:
    """A descriptor, and how much lies behind it. Closed and unmapped when its last holder lets go, so that
    no thread that still reads can meet something else in its place."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._address = 0
        self._view = memoryview(b"")
        self._unmap = _libc.munmap

    def __del__(self) -> None:
        if self._address:
            self._unmap(self._address, self.nbytes)
        os.close(self.fd)

    def map(self) -> int:
        """The address where it can be read. Raises OSError unless it is ordinary memory of this size that
        cannot shrink: then reading it never fails, whatever its owner does."""
        if not self._address:
            if not fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(errno.EPERM, "memory that could shrink is not read")
            size = os.fstat(self.fd).st_size
            if size < self.nbytes:
                raise OSError(errno.EBADMSG, f"a descriptor of {size} bytes, not memory of {self.nbytes}")
            if os.fstatvfs(self.fd).f_bsize != mmap.PAGESIZE:
                raise OSError(errno.EBADMSG, "memory of huge pages is not read: a hole in it ends its reader")
            address = _libc.mmap(None, self.nbytes, mmap.PROT_READ, mmap.MAP_SHARED, self.fd, 0)
            if address is None or address == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), "memory cannot be mapped")
            self._address = address
            self._view = (
                memoryview((ctypes.c_ubyte * self.nbytes).from_address(address)).cast("B").toreadonly()
            )
        return self._address

    def view(self, offset: int, nbytes: int) -> memoryview:
        """To read, while this object lives. Raises OSError as `map` does, or when it is too short."""
        self.address_of(offset, nbytes)
        return self._view[offset : offset + nbytes]

    def address_of(self, offset: int, nbytes: int) -> int:
        """As `view`."""
        address = self._address or self.map()
        if not 0 <= offset <= self.nbytes - nbytes:
            raise OSError(errno.EIO, f"{nbytes} bytes at {offset} in memory of {self.nbytes} bytes")
        return address + offset


class MemoryConnection:
    """Messages between two processes that share memory. Used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._buffer = bytearray(MAX_MESSAGE_NBYTES + 1)
        self._view = memoryview(self._buffer)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes | memoryview) -> bool:
        """Never waits. False: the peer has not read what it was sent before. Raises OSError when it is gone,
        or the message is too long for the system."""
        try:
            self._socket.send(message, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        return True

    def receive(self) -> bytes | None:
        """The next message; None: there is none now. Raises OSError when the peer is gone, or sent one of
        more than `MAX_MESSAGE_NBYTES`."""
        try:
            nbytes = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return None
        if not nbytes:
            raise OSError(errno.ECONNRESET, "the peer is gone")
        if nbytes > MAX_MESSAGE_NBYTES:
            raise OSError(errno.EMSGSIZE, f"a message of more than {MAX_MESSAGE_NBYTES} bytes")
        return bytes(self._view[:nbytes])

    def close(self) -> None:
        self._socket.close()


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


def read_into(memory: Memory, offset: int, target: bytearray | memoryview) -> None:
    """Fills the target (a writable buffer), without the GIL. Raises OSError when there is too little."""
    source, nbytes = memory.address_of(offset, len(target)), len(target)
    if nbytes:
        ctypes.memmove(ctypes.addressof(ctypes.c_ubyte.from_buffer(target)), source, nbytes)


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
) -> tuple[MemoryConnection, Memory]:
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
        theirs.map()
    except OSError:
        connection.close()
        raise
    return MemoryConnection(connection), theirs


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
        memory.map()
    return JoinRequest(token, memory)


def accept_join(connection: socket.socket, memory: Memory) -> None:
    """Hands out a descriptor that can only be read."""
    read_only = Memory(os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC), memory.nbytes)
    socket.send_fds(connection, [_JOINED.pack(memory.nbytes)], [read_only.fd])


def _receive(connection: socket.socket, nbytes: int) -> tuple[bytes, Memory | None]:
    message, fds, _, _ = socket.recv_fds(connection, nbytes, 4)
    memories = [Memory(fd, 0) for fd in fds]
    return message, memories[0] if len(memories) == 1 else None


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
