"""A trial: every host opens the backend, writes, and reads what every other host wrote."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transfer_queue.doctor import messages as d
from transfer_queue.doctor.hosts import LocalHost, RemoteHost, TrialHost
from transfer_queue.doctor.report import HostReport, ReadReport, TrialReport, Trouble, differences, remedy
from transfer_queue.errors import ProtocolError, TransferQueueError
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address, host_towards, is_everywhere, parse_address

UNUSED = "-"  # in place of a token: an address is told without one


def settings_of(full: Any) -> bytes:
    """What a trial takes of merged settings."""
    from omegaconf import OmegaConf

    return json.dumps({
        "backend": OmegaConf.to_container(full.backend, resolve=True),
        "server": {"host": full.server.host, "port": full.server.port},
    }).encode()  # fmt: skip


def try_hosts(
    backend: str, settings: bytes, others: Sequence[Address], token: str, timeout_s: float, wait_s: float
) -> TrialReport:
    """Lead a trial of this host and of those where agents listen at `others`, and report. Raises `ConfigError`.

    Nothing of it is left. It has a step for each host and three more, each of which ends in time (`messages.limit_s`).
    """
    hosts: list[TrialHost] = [LocalHost(token, settings), *(RemoteHost(address, wait_s) for address in others)]
    trial = Trial(backend, hosts, timeout_s)
    try:
        trial.begin()
        trial.open(_listening_host(others))
        trial.write()
        trial.read()
        return trial.report()
    except BaseException:
        for host in hosts:
            host.interrupt()
        raise
    finally:
        trial.close()


def _listening_host(others: Sequence[Address]) -> str:
    """Where the others reach this host: the address that leads to the first of them."""
    for address in others:
        try:
            return host_towards(address)
        except OSError:
            continue  # it was not reached, and its trouble says so
    return ""


class Trial:
    """The hosts are asked at the same time; the first one leads. A host that does not answer is asked nothing more."""

    def __init__(self, backend: str, hosts: Sequence[TrialHost], timeout_s: float) -> None:
        self._backend, self._hosts, self._timeout_s = backend, hosts, timeout_s
        self._begin = d.BeginTrial(backend, secrets.token_bytes(d.NONCE_NBYTES), timeout_s)
        self._threads = ThreadPoolExecutor(len(hosts), "tq-doctor")
        self._reports = [HostReport(host.label) for host in hosts]
        self._facts: dict[int, d.HostFacts] = {}
        self._troubles: list[Trouble] = []
        self._reads: list[ReadReport] = []
        self._taking_part = set(range(len(hosts)))

    def begin(self) -> None:
        """Meet the hosts."""
        for number, answer in self._all(lambda number: self._hosts[number].begin(self._begin)).items():
            if self._fits(number, answer, d.HostFacts, self._begin):
                report, self._facts[number] = self._reports[number], answer
                report.name, report.python, report.libraries = answer.name, answer.python, answer.libraries
                report.rdma_devices, report.free_nbytes = answer.rdma_devices, answer.free_nbytes

    def open(self, host: str) -> None:
        """Start the first server, and then the others, which join it."""
        self._note_opened({0}, lambda _: d.LeadTrial(host))
        if 0 not in self._taking_part:  # without it there is nothing to join
            self._taking_part.clear()
        address = _reached(self._reports[0].address, host)
        self._note_opened(self._taking_part - {0}, lambda _: d.JoinTrial(address))

    def _note_opened(self, numbers: set[int], order_of: Callable[[int], m.Message]) -> None:
        for number, answer in self._ask(numbers, order_of).items():
            if self._fits(number, answer, d.HostOpened, order_of(number), self._reports[0].address):
                report = self._reports[number]
                report.address, report.endpoint, report.opened_s = answer.address, answer.endpoint, answer.seconds

    def write(self) -> None:
        for number, answer in self._ask(self._taking_part, d.WriteTrial).items():
            if self._fits(number, answer, d.BytesMoved, d.WriteTrial(number)):
                self._reports[number].written_s = answer.seconds

    def read(self) -> None:
        """In rounds, in each of which every host reads of another one and is read by one: no host has to serve many at
        once, and all pairs take as many rounds as there are others. A host that is alone reads its own."""
        num_hosts = len(self._hosts)
        for step in range(1, num_hosts) if num_hosts > 1 else (0,):
            of = {reader: (reader + step) % num_hosts for reader in range(num_hosts)}
            self._read_round({reader: of[reader] for reader in of if self._reports[of[reader]].written_s is not None})

    def _read_round(self, of: Mapping[int, int]) -> None:
        for reader, answer in self._ask(set(of), lambda reader: d.ReadTrial(of[reader])).items():
            writer = self._reports[of[reader]]
            read = ReadReport(writer.host, self._reports[reader].host)
            self._reads.append(read)
            there = f"{writer.host} at {writer.endpoint or writer.address}"
            if self._fits(reader, answer, d.BytesMoved, d.ReadTrial(of[reader]), there):
                read.nbytes, read.seconds = answer.nbytes, answer.seconds
            else:
                read.trouble = self._troubles[-1].text

    def report(self) -> TrialReport:
        num_hosts = len(self._hosts)
        works = not self._troubles and len(self._reads) == max(1, num_hosts * (num_hosts - 1))
        remarks = list(differences((self._reports[number].host, facts) for number, facts in self._facts.items()))
        return TrialReport(self._backend, works, self._reports, self._reads, self._troubles, remarks)

    def close(self) -> None:
        """The others are let go first: no unit is to lose its controller while it is asked something."""
        for host in self._hosts[1:]:
            host.close()
        self._hosts[0].close()
        self._threads.shutdown()

    def _ask(self, numbers: set[int], order_of: Callable[[int], m.Message]) -> dict[int, Any]:
        asked = self._taking_part & numbers
        return self._all(lambda number: self._hosts[number].ask(order_of(number), self._timeout_s), asked)

    def _all(self, ask: Callable[[int], m.Message], numbers: set[int] | None = None) -> dict[int, Any]:
        """What each host answers, or the error that came instead."""

        def one(number: int) -> m.Message | TransferQueueError:
            try:
                return ask(number)
            except TransferQueueError as error:
                return error

        ordered = sorted(self._taking_part if numbers is None else numbers)
        return dict(zip(ordered, self._threads.map(one, ordered), strict=True))

    def _fits(self, number: int, answer: Any, kind: type[m.Message], order: m.Message, there: str = "") -> bool:
        """Whether the host answered what was asked; else its trouble is noted."""
        if isinstance(answer, kind):
            return True
        host = self._reports[number].host
        has_answered = isinstance(answer, m.Failed)
        if not isinstance(answer, (m.Failed, TransferQueueError)):
            answer = ProtocolError(f"{type(answer).__name__} in answer to {type(order).__name__}")
        text = answer.text if isinstance(answer, m.Failed) else str(answer)
        if not has_answered or isinstance(order, (d.BeginTrial, d.LeadTrial, d.JoinTrial)):
            self._taking_part.discard(number)  # a host that cannot write may still read
        what_to_do = remedy(order, answer.code, self._backend, host, there, has_answered)
        self._troubles.append(Trouble(_where(order, host, there), answer.code, text, what_to_do))
        return False


def _reached(listening: str, host: str) -> str:
    """The address of a server for others, which listens at `host` or everywhere."""
    place = parse_address(f"tcp:{listening}", UNUSED) if listening else Address()
    return str(place._replace(host=host) if is_everywhere(place.host) else place)


def _where(order: m.Message, host: str, there: str) -> str:
    match order:
        case d.LeadTrial():
            return f"{host} starts a service"
        case d.JoinTrial():
            return f"{host} joins {there}"
        case d.WriteTrial():
            return f"{host} writes"
        case d.ReadTrial():
            return f"{host} reads from {there}"
    return host
