"""A transport as a third party would bring one: a thread in each process answers reads of what is registered."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.memory.bytes import Bytes, address_of
from transfer_queue.storage.transports import NotReached, RemoteSpan, Transport

SPAN = struct.Struct("<QQ")  # address, bytes
REFUSED, GIVEN = b"n", b"y"


class PlainTransport(Transport):
    def __init__(self, settings: Mapping[str, Any], host: str) -> None:
        self._memories: dict[int, Bytes] = {}
        self._listening = socket.create_server((host, 0))
        self.endpoint = f"{host}:{self._listening.getsockname()[1]}"
        self._server = threading.Thread(target=self._serve, daemon=True)
        self._server.start()

    def register(self, memory: Bytes) -> None:
        self._memories[address_of(memory)] = memory

    def unregister(self, memory: Bytes) -> None:
        del self._memories[address_of(memory)]

    def read(self, endpoint: str, spans: Sequence[RemoteSpan]) -> None:
        host, _, port = endpoint.rpartition(":")
        try:
            with socket.create_connection((host, int(port))) as line:
                for address, into in spans:
                    line.sendall(SPAN.pack(address, len(into)))
                    if line.recv(1) != GIVEN:
                        raise NotReached(f"{len(into)} bytes at {address} are not to be had from {endpoint}")
                    left = memoryview(into)  # type: ignore[arg-type]
                    while left:
                        count = line.recv_into(left)
                        if not count:
                            raise NotReached(f"{endpoint} is gone")
                        left = left[count:]
        except OSError as error:
            raise NotReached(f"{endpoint}: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._server.join()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listening.accept()
            except OSError:
                return
            with line, contextlib.suppress(OSError):
                self._answer(line)

    def _answer(self, line: socket.socket) -> None:
        while asked := line.recv(SPAN.size, socket.MSG_WAITALL):
            address, nbytes = SPAN.unpack(asked)
            known = dict(self._memories)
            found = [one[address - start :][:nbytes] for start, one in known.items() if start <= address]
            fits = [part for part in found if len(part) == nbytes]
            line.sendall(GIVEN if fits else REFUSED)
            if fits:
                line.sendall(memoryview(fits[0]))  # type: ignore[arg-type]
