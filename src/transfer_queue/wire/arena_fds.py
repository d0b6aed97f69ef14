"""The door's two messages: a visitor sends `NUMBER`, the server answers `SIZE` with the arena's descriptor."""

from __future__ import annotations

import socket
import struct
from array import array

NUMBER = struct.Struct("<I")
SIZE = struct.Struct("<Q")
FD_SPACE = socket.CMSG_SPACE(4)


def received(sock: socket.socket, nbytes: int) -> tuple[bytes, list[int]]:
    """At most so many bytes, and the descriptor that came along, which programs that are started do not get
    (`socket.recv_fds` looks at no flags)."""
    data, extras, _, _ = sock.recvmsg(nbytes, FD_SPACE, socket.MSG_CMSG_CLOEXEC)
    return data, fds_in(extras)


def fds_in(extras: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors of ancillary data."""
    found = array("i")
    for level, kind, data in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) // 4 * 4])
    return found.tolist()
