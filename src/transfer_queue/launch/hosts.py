"""A job on several hosts: how its first host tells the others where the service is, and with what token.

store     torch's key-value store: of the agent under torchrun, else of an initialised process group
agreed    TQ_TOKEN in all processes: the host is that of the first process, the port follows from the job's name
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from transfer_queue.errors import ConfigError, ServiceUnavailable
from transfer_queue.launch.job import HostSpan, Job
from transfer_queue.structs import decodable
from transfer_queue.wire.address import is_loopback, parse_address
from transfer_queue.wire.token import token_from_environment

FIND_TIMEOUT_S = 90.0
RETRY_INTERVAL_S = 0.1
PORTS = range(20_000, 32_000)  # below those that systems give to outgoing connections
REMEDY = (
    "Do one of these: under Slurm, `export TQ_TOKEN=$(openssl rand -hex 32)` before `srun --export=ALL`; call "
    "torch.distributed.init_process_group() before transfer_queue.init(); or run `tq serve --host ADDRESS --port PORT` "
    "on one host, and set TQ_ADDRESS=tcp:ADDRESS:PORT and TQ_TOKEN for all processes"
)


@decodable
class ServicePlace(msgspec.Struct, frozen=True):
    """Where a service is for other hosts. `unit_token`: with it a host joins with memory of its own ("": it cannot)."""

    tcp: str
    token: str = ""
    unit_token: str = ""


class Board(Protocol):
    """Where the first host of a job leaves its `ServicePlace` and the others find it."""

    def port(self) -> int:
        """Where the service has to listen; 0: anywhere."""

    def publish(self, place: ServicePlace) -> None:
        """Leave it there, in place of one that was left before. Raises `ServiceUnavailable`."""

    def read(self, timeout_s: float) -> ServicePlace | None:
        """What was left there, waiting for it at most so long. Raises `ServiceUnavailable`."""


class StoreBoard:
    """A key in torch's store. Who reaches the store can read it; a token that all processes have is left out."""

    def __init__(self, store: Any, span: HostSpan) -> None:
        self._store = store
        self._key = f"transfer_queue/{span.attempt}"

    def port(self) -> int:
        return 0

    def publish(self, place: ServicePlace) -> None:
        if place.token == token_from_environment():
            place = ServicePlace(place.tcp, unit_token=place.unit_token)
        try:
            found = msgspec.json.encode(place)
            if not self._store.check([self._key]) or self._store.get(self._key) != found:
                self._store.set(self._key, found.decode())
        except RuntimeError as error:  # DistError
            raise ServiceUnavailable(f"torch's store does not answer: {error}") from error

    def read(self, timeout_s: float) -> ServicePlace | None:
        try:
            if timeout_s and not self._store.check([self._key]):
                self._store.wait([self._key], timedelta(seconds=timeout_s))
            if not self._store.check([self._key]):
                return None
            found = msgspec.json.decode(self._store.get(self._key), type=ServicePlace)
        except RuntimeError as error:
            raise ServiceUnavailable(f"nothing was found in torch's store within {timeout_s:g} s: {error}") from error
        except msgspec.DecodeError as error:
            raise ServiceUnavailable(f"torch's store holds something else: {error}") from error
        return ServicePlace(found.tcp, found.token or token_from_environment(), found.unit_token)


class AgreedBoard:
    """Nothing is written: all processes know the token, the first host, and the name of the job."""

    def __init__(self, job: Job, span: HostSpan, port: int) -> None:
        self._port = port or PORTS[int(job.common, 16) % len(PORTS)]
        first = f"[{span.first}]" if ":" in span.first else span.first
        self._place = ServicePlace(
            f"tcp:{first}:{self._port}", token_from_environment(), token_from_environment("TQ_UNIT_TOKEN")
        )

    def port(self) -> int:
        return self._port

    def publish(self, place: ServicePlace) -> None:
        pass

    def read(self, timeout_s: float) -> ServicePlace | None:
        deadline = time.monotonic() + timeout_s
        while not listens(self._place):
            if time.monotonic() >= deadline:
                return None
            select.select([], [], [], RETRY_INTERVAL_S)  # a host that begins to listen tells nobody
        return self._place


def listens(place: ServicePlace) -> bool:
    try:
        parse_address(place.tcp, place.token).connect(1.0).close()
    except OSError:
        return False
    return True


def find(board: Board, timeout_s: float) -> ServicePlace | None:
    """Where a service listens, as its board says: what is left there may be of one that died, whose host will tell of
    the next. None where there is none in time. Raises `ServiceUnavailable`."""
    deadline = time.monotonic() + timeout_s
    place = board.read(timeout_s)
    while place is not None and not listens(place):
        if time.monotonic() >= deadline:
            return None
        select.select([], [], [], RETRY_INTERVAL_S)
        place = board.read(max(0.0, deadline - time.monotonic()))
    return place


def board(job: Job, port: int = 0) -> Board | None:
    """How the hosts of a job find each other; None where there is no way. `port`: the one that was configured.

    The same one in every process, whenever it asks: torchrun's store is there from the start, and the token is set for
    all. A process group comes last: some may ask before they have initialised it. Raises `ServiceUnavailable`.
    """
    assert job.span is not None
    store = _agents_store()
    if store is None and token_from_environment():
        return AgreedBoard(job, job.span, port)
    store = store or _groups_store()
    return None if store is None else StoreBoard(store, job.span)


def _agents_store() -> Any:
    """The store of torchrun's agent, as a client of it; None where there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "0")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=FIND_TIMEOUT_S))
    except RuntimeError as error:
        raise ServiceUnavailable(f"torchrun's store at {host}:{port} does not answer: {error}") from error


def _groups_store() -> Any:
    """The store of this process's process group; None before there is one."""
    distributed = sys.modules.get("torch.distributed")  # who has not loaded it has no group
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def refusal(job: Job) -> ConfigError:
    """Why no service is started: it would be one of several."""
    return ConfigError(
        f"{job.title} runs on several hosts, and they have no way to tell each other where the service is. {REMEDY}"
    )


def not_found(job: Job, span: HostSpan) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"{job.title}: no service was found on its first host, {span.first}, within {FIND_TIMEOUT_S:g} s: a process "
        f"there has to call transfer_queue.init(), too, and {span.first} has to be reachable from here. {REMEDY}"
    )


def listening_host(span: HostSpan) -> str:
    """The address of this host, the first one, at which the others reach it. Raises `ConfigError`."""
    try:
        found = str(socket.getaddrinfo(span.first, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"the first host of the job, {span.first!r}, has no address here: {error}") from error
    if is_loopback(found) and not is_loopback(span.first):
        raise ConfigError(
            f"{span.first} is {found} on its own host, where no other host reaches it: correct /etc/hosts, or give "
            "server.host an address of the network"
        )
    return found
