"""Whether this host reaches every server of a service that runs, and what lies there: `tq doctor --address`.

Each server is connected to as a client of another host does, is given rows over that connection, which lie with it, and
this host reads and compares them, by its own server where it has one. What the servers reach of each other is not seen.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from transfer_queue.client.drivers import run
from transfer_queue.client.effects import Call
from transfer_queue.client.operations import kv
from transfer_queue.client.session import Session
from transfer_queue.doctor.member import FIELD, NUM_ROWS, ROW_NBYTES
from transfer_queue.doctor.report import BY_CODE, SIMPLE, HostReport, ReadReport, TrialReport, Trouble
from transfer_queue.errors import ConfigError, DataLost, ServiceUnavailable, TransferQueueError
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, parse_address

HERE, CONTROLLER = "this host", "the controller"
OF_TRANSPORT = {"Mooncake": "MooncakeStore"}  # the backend that brings it


class _TriedServer(NamedTuple):
    """`address`: HOST:PORT ("": it is not served to other hosts)."""

    label: str
    address: str
    is_away: bool


def try_service(backend: str | None, address: Address, timeout_s: float) -> TrialReport:
    """Try each server of the service at `address`, and report. `backend`: what it is expected to have (None: any).

    Blocks for as long as the service takes, a call at most `timeout_s`. The rows of the trial, 32 MiB at a time, are of
    a partition of its own and are deleted. Raises as a session where nobody answers at `address`.
    """
    with _opened(address, timeout_s) as session:
        trial = _ServiceTrial(session, timeout_s)
        trial.look(backend)
        for server in trial.servers():
            trial.attempt(server)
        return trial.report()


@contextmanager
def _opened(address: Address, timeout_s: float) -> Iterator[Session]:
    session = Session(address, timeout_s)
    try:
        session.config["timeout_s"] = timeout_s
        yield session
    finally:
        session.close()


class _ServiceTrial:
    """`session`: by which this host reads."""

    def __init__(self, session: Session, timeout_s: float) -> None:
        self._session, self._timeout_s = session, timeout_s
        self._backend = backend_of(session)
        self._token = session.address.token or str(session.config.get("token", ""))
        self._partition = f"doctor-{secrets.token_hex(6)}"
        self._hosts: list[HostReport] = []
        self._reads: list[ReadReport] = []
        self._troubles: list[Trouble] = []

    def look(self, backend: str | None) -> None:
        """Whether it is the backend that is meant."""
        if backend not in (None, self._backend):
            error = ConfigError(f"its large rows lie in {self._backend}, not in {backend}")
            self._note(f"the service at {self._session.address}", error, "name that one, or another --address")
        remark = str(self._session.config.get("remark", ""))
        if remark:
            self._note(HERE, ServiceUnavailable(remark), "see the log of the controller's server")

    def servers(self) -> list[_TriedServer]:
        """The controller's, and the units. Raises a `TransferQueueError` where nobody says which there are."""
        found = _stats(self._session)
        if "controller" in found:  # of a unit
            with self._at(str(found["controller"]).removeprefix("tcp:")) as controller:
                found = _stats(controller)
        units = found["units"].items()
        return [
            _TriedServer(CONTROLLER, str(found["tcp"]), False),
            *(_TriedServer(f"unit {number}", str(one["address"]), bool(one["away"])) for number, one in units),
        ]

    @contextmanager
    def _at(self, address: str) -> Iterator[Session]:
        """The server there, or the one of this host's session."""
        if not address:
            yield self._session
            return
        with _opened(parse_address(f"tcp:{address}", self._token), self._timeout_s) as session:
            yield session

    def attempt(self, server: _TriedServer) -> None:
        """Reach it, give it rows, and read them."""
        report = HostReport(server.label, address=server.address)
        self._hosts.append(report)
        where = f"{server.label} at {server.address}" if server.address else server.label
        if server.is_away:
            text = "the controller has lost it, and waits for it"
            self._note(where, ServiceUnavailable(text), "see whether it runs, and what its log says")
            return
        try:
            with ExitStack() as opened:
                began = time.monotonic()
                session = opened.enter_context(self._at(server.address))
                report.opened_s = time.monotonic() - began
                report.endpoint = str(session.config.get("transport", {}).get("page", {}).get("endpoint", ""))
                self._move(session, server, report)
        except TransferQueueError as error:
            way = f"let {HERE} reach {server.address}" if server.address else "see the log of that server"
            remedy = BY_CODE.get(error.code, f"{way}, and what {self._backend} needs there: docs/backends.md")
            self._note(where, error, remedy.format(here=where, writer=where, backend=self._backend))

    def _move(self, session: Session, server: _TriedServer, report: HostReport) -> None:
        drawn = np.frombuffer(bytearray(secrets.token_bytes(NUM_ROWS * ROW_NBYTES)), np.uint8)
        rows = torch.from_numpy(drawn.reshape(NUM_ROWS, ROW_NBYTES))
        keys = [f"{server.label} row {row}" for row in range(NUM_ROWS)]
        read = ReadReport(server.label, HERE)
        try:
            began = time.monotonic()
            run(session, kv.kv_batch_put(session, keys, self._partition, {FIELD: rows}))
            report.written_s = time.monotonic() - began
            self._reads.append(read)
            began = time.monotonic()
            data = run(self._session, kv.kv_batch_get(self._session, keys, self._partition, copy=True, dense=True))
            seconds = time.monotonic() - began
            if not torch.equal(data[FIELD], rows):
                raise DataLost(f"{self._backend} gives other bytes than were written at {server.label}")
            read.nbytes, read.seconds = rows.nbytes, seconds
        except TransferQueueError as error:
            read.trouble = str(error)
            raise
        finally:
            run(self._session, kv.kv_clear(self._session, keys, self._partition))

    def _note(self, where: str, error: TransferQueueError, remedy: str) -> None:
        self._troubles.append(Trouble(where, error.code, str(error), remedy))

    def report(self) -> TrialReport:
        return TrialReport(self._backend, not self._troubles, self._hosts, self._reads, self._troubles, [])


def backend_of(session: Session) -> str:
    """Where the large rows of its service lie, as `backend.storage_backend` says it."""
    if "engine" in session.config:
        return str(session.config["engine"]["name"])
    name = str(session.config.get("transport", {}).get("name", ""))
    return OF_TRANSPORT.get(name, name) or SIMPLE


def _stats(session: Session) -> dict[str, Any]:
    values: dict[str, Any] = session.call(Call(m.Stats(session.next_rid())))[0].values
    return values
