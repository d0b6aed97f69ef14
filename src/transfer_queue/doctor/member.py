"""A member of a trial: a process with a server and a client of the trial's service, on one host.

`python -m transfer_queue.doctor.member` is told what to do over its standard input, a socket. It ends when that does,
and its server with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from transfer_queue import config as settings
from transfer_queue.client.drivers import run
from transfer_queue.client.operations import kv
from transfer_queue.client.session import Session
from transfer_queue.doctor import messages as d
from transfer_queue.errors import DataLost, ProtocolError, ServiceUnavailable, TransferQueueError
from transfer_queue.launch import local
from transfer_queue.storage.engines.engine import GROUP
from transfer_queue.storage.host_facts import free_nbytes, rdma_devices
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import is_everywhere, is_here
from transfer_queue.wire.blocking import FrameSocket

NUM_ROWS, ROW_NBYTES = 8, 4 << 20
PARTITION, FIELD = "doctor", "bytes"
IMPORTED = {"Files": "fsspec", "MooncakeStore": "mooncake", "RayStore": "ray", "Yuanrong": "yr"}
ALWAYS = ("torch", "msgspec")
VERSION = Path(__file__).parent.parent / "version" / "version"
BOOT_ID, NETWORK = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"


class TrialMember:
    """Carries out one order after the other."""

    def __init__(self, told: d.TrialSetup) -> None:
        self._told = told
        self._server: local.LocalServer | None = None
        self._session: Session | None = None

    def answer(self, order: m.Message) -> m.Message:
        """Raises a `TransferQueueError` with what does not work."""
        match order:
            case d.LeadTrial(host=host):
                return self._open({"host": host and (self._own_host() or host)})
            case d.JoinTrial(address=address):
                return self._open({"host": self._own_host(), "join": address})
            case d.WriteTrial(number=number):
                return self._write(number)
            case d.ReadTrial(number=number):
                return self._read(number)
        raise ProtocolError(f"{type(order).__name__} is no order")

    def _own_host(self) -> str:
        """What this host's settings say, unless they are those of another host, which all hosts share."""
        host = str(json.loads(self._told.settings)["server"]["host"] or "")
        return host if host and (is_everywhere(host) or is_here(host)) else ""

    def _open(self, server: dict[str, Any]) -> d.HostOpened:
        if self._server is not None:
            raise ProtocolError("this host takes part already")
        given = json.loads(self._told.settings)
        began = time.monotonic()
        full = settings.merged({
            "backend": {**given["backend"], "required": True},  # a trial of another backend would tell nothing
            "client": {"timeout_s": self._told.begin.timeout_s},
            "server": {"port": given["server"]["port"], "durability": "none", **server},
        })  # fmt: skip
        config = settings.server_config(full, "", os.getpid())
        self._server = local.start(msgspec.structs.replace(config, job="tq doctor"))
        self._session = Session(self._server.addresses[0], self._told.begin.timeout_s)
        page = self._session.config.get("transport", {}).get("page", {})
        return d.HostOpened(self._server.tcp, str(page.get("endpoint", "")), time.monotonic() - began)

    def _write(self, number: int) -> d.BytesMoved:
        rows = torch.from_numpy(self._rows_of(number))
        began = time.monotonic()
        run(self._open_session(), kv.kv_batch_put(self._open_session(), keys_of(number), PARTITION, {FIELD: rows}))
        return d.BytesMoved(rows.nbytes, time.monotonic() - began)

    def _read(self, number: int) -> d.BytesMoved:
        session = self._open_session()
        began = time.monotonic()
        data = run(session, kv.kv_batch_get(session, keys_of(number), PARTITION, copy=True, dense=True))
        seconds = time.monotonic() - began
        found = data[FIELD].numpy()
        if not np.array_equal(found, self._rows_of(number)):
            raise DataLost(f"{self._told.begin.backend} gives other bytes than host {number} wrote")
        return d.BytesMoved(found.nbytes, seconds)

    def _rows_of(self, number: int) -> Any:
        """Bytes that no other host and no other trial writes."""
        seed = hashlib.sha256(self._told.begin.nonce + str(number).encode()).digest()
        drawn = np.random.default_rng(list(seed)).bytes(NUM_ROWS * ROW_NBYTES)
        return np.frombuffer(bytearray(drawn), np.uint8).reshape(NUM_ROWS, ROW_NBYTES)

    def _open_session(self) -> Session:
        if self._session is None:
            raise ProtocolError("this host takes no part yet")
        return self._session

    def close(self) -> None:
        """The server ends, and with it all that was written."""
        if self._session is not None:
            self._session.close()
        if self._server is not None:
            self._server.stop()


def keys_of(number: int) -> list[str]:
    return [f"host-{number}-row-{row}" for row in range(NUM_ROWS)]


def facts(backend: str) -> d.HostFacts:
    """What this host has, with the libraries that `backend` needs."""
    with open(BOOT_ID) as file:
        machine = f"{file.read().strip()} {os.readlink(NETWORK)}"
    return d.HostFacts(
        socket.gethostname(), machine, platform.python_version(), dict(_libraries(backend)), rdma_devices(),
        free_nbytes(),
    )  # fmt: skip


def _libraries(backend: str) -> Iterator[tuple[str, str]]:
    yield "transfer-queue", VERSION.read_text().strip()
    imported = [*ALWAYS, IMPORTED[backend]] if backend in IMPORTED else ALWAYS
    brought = metadata.packages_distributions()  # by the name that is imported: Mooncake's has several
    for name in dict.fromkeys(name for one in imported for name in brought.get(one, ())):
        yield name, metadata.version(name)
    for entry in metadata.entry_points(group=GROUP):
        if entry.name == backend and entry.dist is not None:
            yield entry.dist.name, entry.dist.version


def _take_part(stream: FrameSocket[m.Message]) -> None:
    told = stream.receive(None)[0]
    if not isinstance(told, d.TrialSetup):
        raise ProtocolError(f"{type(told).__name__} before the setup")
    _leave_the_job(told)
    stream.send(facts(told.begin.backend), None)
    member = TrialMember(told)
    try:
        while True:
            order = stream.receive(None)[0]
            try:
                answer = member.answer(order)
            except (TransferQueueError, OSError) as error:
                answer = m.Failed(0, getattr(error, "code", ServiceUnavailable.code), str(error))
            stream.send(answer, None)
    finally:
        member.close()


def _leave_the_job(told: d.TrialSetup) -> None:
    """What the environment says of a job is not said of the trial. Tokens go where the settings look for them; what a
    process changes here does not show in /proc."""
    for name in [name for name in os.environ if name.startswith("TQ_")]:
        del os.environ[name]
    os.environ["TQ_TOKEN"], os.environ["TQ_UNIT_TOKEN"] = told.token, told.unit_token


def main() -> None:
    """Until the one who started this process closes the socket, or ends."""
    with socket.socket(fileno=os.dup(0)) as sock:
        stream = d.stream_over(sock, d.decode_at_member, "who started this")
        with contextlib.suppress(ServiceUnavailable):  # it is over
            _take_part(stream)


if __name__ == "__main__":
    main()
