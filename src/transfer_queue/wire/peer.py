"""Who is at the other end of a unix socket, and who could have put it there."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from transfer_queue.errors import AccessDenied

CREDENTIALS = struct.Struct("3i")
LISTENS = 0x10000  # __SO_ACCEPTCON


def peer(sock: socket.socket) -> tuple[int, int]:
    """The process (0: of another pid namespace) and the user at the other end of a unix socket (SO_PEERCRED)."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(data)
    return pid, uid


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a unix socket."""
    return peer(sock)[1]


def unsafe(directory: str) -> str:
    """Why other users could replace what lies in `directory`; "" when they cannot. Raises OSError.

    With the sticky bit everybody may add files, but only their owners may replace them (inode(7)).
    """
    found = os.stat(directory or ".")
    if found.st_uid not in (os.geteuid(), 0):
        return f"{directory} belongs to another user (uid {found.st_uid}); use a directory of your own"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(found.st_mode)
        return f"users other than its owner may write to {directory} (mode {mode:o}): chmod go-w {directory}"
    return ""


def check_peer(path: str, sock: socket.socket) -> None:
    """Refuse a connected unix socket that is not surely a server of ours: `AccessDenied`, an OSError too.

    A path that begins with NUL is a name without a directory (unix(7), abstract).
    """
    uid = peer_uid(sock)
    if uid not in (os.geteuid(), 0):
        shown = path.replace("\0", "@")
        raise AccessDenied(f"the server at unix:{shown} runs as another user (uid {uid})")
    why = "" if path.startswith("\0") else unsafe(os.path.dirname(path))
    if why:
        raise AccessDenied(why)


def still_listens(path: str) -> bool:
    """Whether a process listens at a socket that was bound there, though nothing may lie there any more.

    Asks the kernel for the sockets that were bound so (proc(5), /proc/net/unix), and then for a process that has one
    of them and sees the same files: in another mount namespace the path is another place. False where nobody can tell.
    """
    numbers = set(_listening(path))
    if not numbers:
        return False
    wanted = {f"socket:[{number}]" for number in numbers}
    return any(_has_socket(pid, wanted) for pid in os.listdir("/proc") if pid.isdecimal())


def _listening(path: str) -> Iterator[str]:
    """The inodes of the unix sockets that were bound to a path and listen."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
            fields = line.split(None, 7)
            if len(fields) == 8 and fields[7] == path and int(fields[3], 16) & LISTENS:
                yield fields[6]


def _has_socket(pid: str, wanted: set[str]) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        if os.path.samestat(os.stat(f"/proc/{pid}/ns/mnt"), os.stat("/proc/self/ns/mnt")):
            return any(_link(f"/proc/{pid}/fd/{number}") in wanted for number in os.listdir(f"/proc/{pid}/fd"))
    return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""
