"""Mooncake's Transfer Engine: one-sided reads of registered memory, over TCP or RDMA.

Facts behind it, of mooncake-transfer-engine 0.3.13: processes that meet among themselves (P2PHANDSHAKE) need no server;
a read of what is not registered is refused by the process that is asked; ranges that overlap cannot both be registered.
The engine opens ports of its own, which ask for no token: who reaches them can read, and write, what is registered.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.memory.bytes import Bytes, address_of
from transfer_queue.storage.transports.transport import NotReached, RemoteSpan, Transport

PEER_TO_PEER = "P2PHANDSHAKE"
_open: weakref.WeakSet[MooncakeTransport] = weakref.WeakSet()
_held: list[Any] = []  # engines, while a fork is under way


class MooncakeTransport(Transport):
    """Settings: `protocol`, `device_name`, and `local_hostname`, which counts in place of `host`."""

    def __init__(self, settings: Mapping[str, Any], host: str) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else it writes a dozen lines about every start
        from mooncake.engine import TransferEngine

        protocol = str(settings.get("protocol") or "tcp")
        own = str(settings.get("local_hostname") or host)
        self._engine: Any = TransferEngine()
        _open.add(self)
        code = self._engine.initialize(own, PEER_TO_PEER, protocol, str(settings.get("device_name") or ""))
        if code:
            raise OSError(f"error {code}: no endpoint for {protocol} at {own}")
        self.endpoint = f"{own}:{self._engine.get_rpc_port()}"
        self.pins_memory = protocol != "tcp"

    def register(self, memory: Bytes) -> None:
        code = self._engine.register_memory(address_of(memory), len(memory))
        if code:
            raise OSError(f"error {code} while {len(memory)} bytes of memory were registered")

    def unregister(self, memory: Bytes) -> None:
        self._engine.unregister_memory(address_of(memory))

    def read(self, endpoint: str, spans: Sequence[RemoteSpan]) -> None:
        code = self._engine.batch_transfer_sync_read(
            endpoint, [address_of(span.into) for span in spans], [span.address for span in spans],
            [len(span.into) for span in spans],
        )  # fmt: skip
        if code:
            nbytes = sum(len(span.into) for span in spans)
            raise NotReached(f"Mooncake could not read {nbytes} bytes from {endpoint} (error {code})")

    def close(self) -> None:
        self._engine = None

    def held(self) -> Any:
        return self._engine


def _hold() -> None:
    """Before a fork: one reference more to each engine. The child never gives it back, for the threads of the engine
    are not there, and who took it apart would wait for them, or crash."""
    for engine in [transport.held() for transport in list(_open)]:
        if engine is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
            _held.append(engine)


def _let_go() -> None:
    while _held:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(_held.pop()))


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_held.clear)
