"""The service of a job: found or started by any of its processes on a host, ended with the job.

On one host its run directory is named by the job's key, and a lock lets one process start the server. A job on several
hosts has the service on the host of its first process; on every other host a unit joins it, or processes attach by TCP.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence

import msgspec

from transfer_queue.errors import AccessDenied, ServiceUnavailable
from transfer_queue.launch import hosts, local
from transfer_queue.launch.hosts import Board, ServicePlace
from transfer_queue.launch.job import Job, inherited, kept_by_children
from transfer_queue.launch.launcher import RunningService
from transfer_queue.sampler.script import refuse_while_running
from transfer_queue.server import host_registry
from transfer_queue.server.host_registry import ServerEntry
from transfer_queue.server.settings import SOCKET_NAME, ServerConfig, journal_of_unit
from transfer_queue.wire.address import Address, is_everywhere, parse_address
from transfer_queue.wire.token import token_from_environment

log = logging.getLogger("transfer_queue")


class JobServer:
    """A server that this process started for its job, and whose end is the job's: who leaves takes nothing along."""

    def __init__(self, server: local.LocalServer) -> None:
        self.addresses = server.addresses
        server.release()

    def stop(self) -> None:
        """Nothing: the others still use it."""


class JobLauncher:
    """Finds or starts the service of a job. A process that leads its job owns the server: its `close` ends it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._board: Board | None = None
        self._remote: Address | None = None  # where processes of this host attach when no unit of theirs can join

    @property
    def has_hosts(self) -> bool:
        return self._job.span is not None and self._job.span.certain

    @property
    def _here(self) -> Address:
        """Where the job's server on this host is, or would be."""
        return parse_address(f"unix:{os.path.join(host_registry.private_path(), self._job.key, SOCKET_NAME)}")

    def find(self) -> Sequence[Address]:
        """As in `Launcher`; without waiting for another host: `launch` does."""
        address = self._here
        left = self.left_behind(address)
        if left is None and host_registry.is_private() and local.answers(address):
            if self._job.span is not None and self._job.span.here_first:
                self._publish(str(address))
            return [address]
        entry = inherited([entry for entry in host_registry.running() if entry != left])
        if entry is not None:
            return [parse_address(entry.address)]
        return [] if self._remote is None else [self._remote]

    def launch(self, config: ServerConfig) -> RunningService | None:
        refuse_while_running()  # the server of the one that holds the lock must not wait for it
        span = self._job.span
        if span is not None and not span.here_first:
            joining = self._joining(config)
            if joining is None:
                return None
            config = joining
        elif span is not None:
            config = self._open(config)
        return self._start(config)

    def _start(self, config: ServerConfig) -> RunningService | None:
        job, leader = self._job, self._job.leader
        try:
            parent = host_registry.private_dir()
        except AccessDenied as error:
            if not job.is_ours:
                raise
            log.warning("processes that this one has started cannot find its service: %s", error)
            return local.start(config)
        config = msgspec.structs.replace(
            config,
            run_dir=os.path.join(parent, job.key),
            owner_pid=leader.pid if leader is not None else 0,
            owner_start=leader.start if leader is not None else 0,
            linger_s=None if job.is_ours else job.linger_s,
            job=job.title,
        )
        try:
            with local.lock(config.run_dir, keep=False, start_s=local.start_timeout_s(config)) as held:
                if self.find():
                    return None
                left = self.left_behind(self._here)
                if left is not None:
                    log.warning("the service at %s is gone: this host joins the one in its place", left.join)
                    local.end(left.server)
                self._look_around()
                self._clean_up(parent)
                server = local.start(config, orphan=not job.is_ours, lock=held)
        finally:
            host_registry.tidy(parent)
        if job.is_ours:
            return server
        started = JobServer(server)
        if job.span is not None and job.span.here_first:
            self._publish(str(started.addresses[0]))
        return started

    def _clean_up(self, parent: str) -> None:
        """Remove what killed services left beside this one's directory: nobody else comes by."""
        try:
            host_registry.sweep(parent)
        except OSError as error:
            log.debug("not all of what killed services left was removed: %s", error)

    def _look_around(self) -> None:
        """Say which services were perhaps meant instead of a new one."""
        running = host_registry.running()
        child = kept_by_children(running, self._job)
        if child is not None:
            log.warning(
                "a process that this one started has a service of its own at %s: call init() here first, or give both "
                "the same run_dir",
                child.address,
            )
        ours = self._job.title.rpartition(".")[0]
        for entry in running:
            if self._job.title.startswith("Slurm") and entry.job.rpartition(".")[0] == ours:
                log.warning(
                    "%s has a service of its own at %s, which other steps find by TQ_ADDRESS only",
                    entry.job,
                    entry.address,
                )

    # Several hosts

    def left_behind(self, address: Address) -> ServerEntry | None:
        """The server at an address, if it is this host's unit of a service that died, and the first host has told of
        another one. It lives on, for the one it knows could come back."""
        span = self._job.span
        if span is None or span.here_first or address != self._here:
            return None
        for entry in host_registry.running():
            if entry.address == str(address) and entry.join and not hosts.listens(ServicePlace(entry.join)):
                try:
                    board = hosts.board(self._job)
                    place = board.read(0.0) if board is not None and not board.port() else None
                except ServiceUnavailable:
                    return None
                moved = place is not None and place.tcp != entry.join and hosts.listens(place)
                return entry if moved else None
        return None

    def _way(self, config: ServerConfig) -> Board | None:
        if self._board is None:
            self._board = hosts.board(self._job, config.port)
        return self._board

    def _open(self, config: ServerConfig) -> ServerConfig:
        """Settings of the service on the first host: it listens for the others where they will look for it."""
        span = self._job.span
        assert span is not None
        board = self._way(config)
        if board is None:
            if span.certain:
                raise hosts.refusal(self._job)
            return config  # nobody says that there are other hosts; processes there are refused
        agreed = token_from_environment()
        unit_token = config.unit_token or token_from_environment("TQ_UNIT_TOKEN")
        return msgspec.structs.replace(
            config,
            host=config.host or hosts.listening_host(span),
            port=config.port or board.port(),
            token=config.token or agreed or secrets.token_hex(32),
            unit_token=unit_token or ("" if board.port() else secrets.token_hex(32)),
        )

    def _publish(self, address: str) -> None:
        """Tell the other hosts; every process here does, for whoever started the server may have been killed."""
        for entry in host_registry.running():
            if entry.address == address and entry.tcp and not entry.join:
                host, _, port = entry.tcp.rpartition(":")
                board = self._board = self._board or hosts.board(self._job, int(port))
                if board is not None and self._job.span is not None:
                    host = hosts.listening_host(self._job.span) if is_everywhere(host.strip("[]")) else host
                    board.publish(ServicePlace(f"tcp:{host}:{port}", entry.token, entry.unit_token))

    def _joining(self, config: ServerConfig) -> ServerConfig | None:
        """Settings of this host's unit; None when the service is used by TCP. Waits for the first host."""
        span = self._job.span
        assert span is not None
        board = self._way(config)
        if board is None:
            raise hosts.refusal(self._job)
        place = hosts.find(board, hosts.FIND_TIMEOUT_S - local.START_TIMEOUT_S + local.start_timeout_s(config))
        if place is None:
            raise hosts.not_found(self._job, span)
        if not place.token:
            raise ServiceUnavailable(f"{self._job.title}: TQ_TOKEN is set on {span.first}, but not here")
        if not place.unit_token:
            self._remote = parse_address(place.tcp, place.token)
            return None
        budget = config.client["settings"].get("backend.SimpleStorage.budget_nbytes") or 0
        return msgspec.structs.replace(
            config,
            join=place.tcp,
            host="",
            port=0,
            token=place.token,
            unit_token=place.unit_token,
            metrics_port=None,
            budget_nbytes=budget,
            journal_dir=journal_of_unit(config.journal_dir),
        )
