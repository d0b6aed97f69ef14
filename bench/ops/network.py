"""Bytes between hosts: plain sockets, and the keys of a batch that another host holds."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
from typing import Any

from bench.session import Session

CHUNK_NBYTES = 8 << 20
COUNT = struct.Struct("<Q")


def serve_raw(session: Session, host: str) -> dict[str, Any]:
    """Send as many bytes as asked for, on every connection to the port that is returned, until the process ends."""
    listener = socket.create_server((host, 0))
    session.scratch["listener"] = listener
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    return {"port": listener.getsockname()[1]}


def _accept(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_send, args=(connection,), daemon=True).start()


def _send(connection: socket.socket) -> None:
    chunk = memoryview(bytes(range(256)) * (CHUNK_NBYTES // 256))
    with connection, contextlib.suppress(OSError):
        while asked := connection.recv(COUNT.size, socket.MSG_WAITALL):
            (left,) = COUNT.unpack(asked)
            while left:
                part = chunk[: min(left, CHUNK_NBYTES)]
                connection.sendall(part)
                left -= len(part)


def receive_raw(session: Session, host: str, port: int, nbytes: int, streams: int) -> dict[str, Any]:
    """Seconds from asking for `nbytes` to having them all in memory that was used before, over warm connections."""
    key = f"raw-{host}-{port}-{streams}-{nbytes}"
    if key not in session.scratch:
        connections = [socket.create_connection((host, port), 10) for _ in range(streams)]
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        session.scratch[key] = (connections, bytearray(nbytes))
    connections, memory = session.scratch[key]
    bounds = [number * nbytes // streams for number in range(streams + 1)]
    parts = [memoryview(memory)[low:high] for low, high in itertools.pairwise(bounds)]
    threads = [
        threading.Thread(target=_receive, args=(connection, part))
        for connection, part in zip(connections[1:], parts[1:], strict=True)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    _receive(connections[0], parts[0])
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    assert memory[-256:] == bytes((nbytes - 256 + i - bounds[-2]) % 256 for i in range(256)), "other bytes came"
    return {"s": seconds}


def _receive(connection: socket.socket, into: memoryview) -> None:
    connection.sendall(COUNT.pack(len(into)))
    while len(into):
        into = into[connection.recv_into(into) :]


def attach(session: Session, address: str) -> dict[str, Any]:
    """Join a service from a host without a unit of its own; the token is in the environment."""
    session.tq.init({"address": address})
    return {}
