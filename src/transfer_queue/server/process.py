"""The server process: listeners, timers, the watch on its owner, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec

from transfer_queue.controller import Controller
from transfer_queue.controller.ledger import Ledger
from transfer_queue.errors import ConfigError, TransferQueueError
from transfer_queue.sampler import from_spec
from transfer_queue.server import host_registry, processes
from transfer_queue.server.connection import ServerConnection
from transfer_queue.server.connection_limit import ConnectionLimit, most_connections
from transfer_queue.server.controller_node import ControllerNode
from transfer_queue.server.engine_blocks import EngineBlocks, opened_engine, reopened
from transfer_queue.server.event_clock import EventClock
from transfer_queue.server.fd_server import ArenaFdServer
from transfer_queue.server.home import move_in
from transfer_queue.server.journal.history import History
from transfer_queue.server.journal.journal import DiskJournal
from transfer_queue.server.journal.kept_member import KeptMember, MemberUnit
from transfer_queue.server.journal.kept_state import KeptService, KeptState
from transfer_queue.server.journal.kept_unit import KeptUnit
from transfer_queue.server.listening import Listening
from transfer_queue.server.metrics.counters import MeteredService
from transfer_queue.server.registered_arenas import RegisteredArenas, opened_transport
from transfer_queue.server.service import Service
from transfer_queue.server.settings import (
    DOOR_NAME,
    NotStarted,
    Ready,
    ServerConfig,
    budget_of,
    clear_run_dir,
    spill_of,
)
from transfer_queue.server.spinner import Spinner
from transfer_queue.server.standby.keeper import END_SIGNALS, StandbyKeeper
from transfer_queue.server.standby.recording import Recorder, RecordingController, RecordingUnit, recording_parts
from transfer_queue.server.standby.returning import ReturningSessions
from transfer_queue.server.storage_node import StorageNode
from transfer_queue.server.turns import Turns
from transfer_queue.server.unit_registry import UnitConnection
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire.address import advertised, host_towards, is_everywhere, parse_address
from transfer_queue.wire.framing import scratch
from transfer_queue.wire.messages import Reply, Request, Welcome

if TYPE_CHECKING:
    from transfer_queue.server.metrics.http import Endpoint

log = logging.getLogger("transfer_queue.server")

REOPEN_S = 1.0  # between two attempts to open an engine in place of the server that was killed
TIDY_S = 0.001  # how long others wait for work that belongs to no request


class Server:
    """One running server; `run` returns after `stop`, SIGTERM, or the end of the owner."""

    def __init__(self, config: ServerConfig) -> None:
        if config.host and not config.token:
            raise ConfigError("serving TCP needs a token: an open port without one would serve everybody")
        if config.join and not config.token:
            raise ConfigError("joining a service needs its token")
        if config.join and not config.unit_token:
            raise ConfigError("joining a service needs its unit token")
        if config.unit_token and config.unit_token == config.token:
            raise ConfigError("the unit token is that of the clients: every client could join as a unit")
        self._follows_host = bool(config.join and not config.host)
        if self._follows_host:
            config = msgspec.structs.replace(config, host=_host_towards(config.join))
        self.config = config
        self.connection_limit: ConnectionLimit[ServerConnection] = ConnectionLimit(most_connections())
        self.turns = Turns()
        self.spinner = Spinner(config.spin_s)
        self.scratch = scratch()  # all connections of this loop receive into it, one after the other
        self.recorder = Recorder()
        self.role = self._joined() if config.join else self._leading()
        self.service = self.role.service
        self.service.deliver = self.deliver
        self.listening: Listening
        self.journal: DiskJournal | None = None  # where there is to be one, from `run` on
        self._history: History | None = None  # beside it
        self.engine: EngineBlocks | None = None
        self.arenas: RegisteredArenas | None = None
        self._remark = ""  # for the logs of clients
        self._due: list[Callable[[], None]] = []  # what looks for work of its own after each event
        self._keeper: StandbyKeeper | None = None
        self._predecessor: StandbyKeeper | None = None  # that made this process a standby
        self._entry = ""  # in the register of this user's servers
        self._metrics: Endpoint | None = None
        self._metrics_port = config.metrics_port or 0  # the one it got, from then on
        self._stopped: asyncio.Event
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = 0.0  # the next deadline
        self._clock = EventClock(self._stood_still)
        self.now = self._clock.now
        self._tidying = False
        self._recent_peak = 0
        self._former: list[object] = []  # what servers before this one had that leads nowhere

    def _joined(self) -> StorageNode:
        """One more unit of a service that is there."""
        config, recorder = self.config, self.recorder if self._has_standby else None
        unit = self._prepared(self._unit())
        where = parse_address(config.join, config.token)
        return StorageNode(
            where, config.unit_token, unit, self.deliver, self._makes_service(unit), recorder, config.away_s
        )

    def _leading(self) -> ControllerNode:
        """The controller with the unit of its host."""
        config, unit = self.config, self._unit()
        kind = RecordingController if self._has_standby else Controller
        controller = kind(
            from_spec(config.sampler), config.max_rows, config.reserved_rows, config.staleness,
            lock_number=time.time_ns() // 1000, max_deliver=config.max_deliver,
            ledger=None if config.journal_dir is None else Ledger(),
        )  # fmt: skip
        if isinstance(controller, RecordingController):
            controller.record_to(self.recorder)
        controller.notice_after(config.notice_after_s)
        return ControllerNode(controller, self._prepared(unit), self._makes_service(unit), config.client)

    @property
    def _has_standby(self) -> bool:
        return self.config.durability != "none"

    def _unit(self) -> Unit:
        """It writes records where there is to be a standby, as all of a service's parts do."""
        config = self.config
        if not self._has_standby:
            return Unit(budget_of(config), config.arena_dir, spill_of(config))
        kind = RecordingUnit
        if config.journal_dir is not None:
            kind = MemberUnit if config.join else KeptUnit
        return kind(budget_of(config), config.arena_dir, self.recorder, spill_of(config))

    def _makes_service(self, unit: Unit) -> Callable[..., Service]:
        kind = self._kind_of_service()
        return partial(kind, **recording_parts(unit, self.recorder)) if self._has_standby else kind

    def _open_journal(self) -> None:
        """What its directory has is what this service has. Raises as `DiskJournal`."""
        directory, service, unit = self.config.journal_dir, self.service, self.service.unit
        if directory is None or not isinstance(unit, KeptUnit):
            return
        kept: KeptState
        if isinstance(self.role, StorageNode):
            assert isinstance(unit, MemberUnit)
            kept = KeptMember(self.role, unit, service.pending)
        else:
            kept = KeptService(self.role.controller, service.members)
        self.journal = service.journal = DiskJournal(directory, kept, unit, self._abandon)
        self.journal.has_let_go = self.deliver
        if isinstance(self.role, ControllerNode):
            self._history = History(self.journal.held.directory, self.role.controller)
            self._history.recall()
        self.recorder.settle()  # nobody stands by yet

    def _keep_history(self) -> None:
        if self._history is not None:
            self._history.begin()
            self._due.append(self._history.look)

    async def _close_journal(self) -> None:
        if self._history is not None:
            await self._history.close()
        if self.journal is not None:
            await self.journal.close()

    def _abandon(self) -> NoReturn:
        """Nothing can be promised any more: end, and let nobody take over."""
        self._dismiss_standby()
        os._exit(1)

    def _prepared(self, unit: Unit) -> Unit:
        unit.notice_after(self.config.notice_after_s)
        unit.shm.open()  # while there are descriptors
        return unit

    def _kind_of_service(self) -> type[Service]:
        return Service if self.config.metrics_port is None else MeteredService

    async def run(self, announce: int) -> None:
        """Serve; writes the addresses as one JSON line to the descriptor `announce`."""
        self._begin()
        home = await move_in(self.config.run_dir)
        try:
            self._open_journal()
            self.listening = Listening(self.config, home)
            if isinstance(self.role, StorageNode):
                self.role.reached_from = self._listen_at if self._follows_host else None
                await self.role.join(self._advertised(self.listening.tcp_name))
            await self._open_backend()
            await self._serve(announce)
        finally:
            self._leave()
            os.close(home)  # and with it the hold on the directory

    def _begin(self) -> None:
        """From now on it can be stopped."""
        self._stopped = asyncio.Event()
        for number in END_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        if self._predecessor is not None and self._predecessor.is_told_to_end:
            self.stop()

    async def _serve(self, announce: int | None) -> None:
        """Until it is stopped, by whoever. `announce` is None where it goes on in place of a server that was killed."""
        loop = asyncio.get_running_loop()
        path, tcp = self.listening.path, self.listening.tcp_name
        self.service.tcp = tcp
        await self._open_metrics(required=announce is not None)
        door = ArenaFdServer(self.listening.door, self.service.unit)
        background = [loop.create_task(self._trim())]
        if self.config.linger_s is not None:
            background.append(loop.create_task(self._linger(self.config.linger_s)))
        if isinstance(self.role, StorageNode):
            background.append(loop.create_task(self.role.stay()))
        returning = ReturningSessions(self.service, self.now, self.deliver)
        try:
            if announce is None:
                returning.expect_all()
            await self.listening.serve(loop, self._local, self._remote)
            watch = self._watch_owner(loop)
            host_registry.leave(self._entry)  # of the server that was killed
            self._entry = self._enter(path, tcp)
            if self.journal is not None:
                self.recorder.settled = self.journal.settle
                await self.journal.start()
                self._keep_history()
                if announce is not None:
                    await self.journal.complete()
            self._start_standby()
            if announce is not None:
                self._announce(announce, path, tcp)
            self.deliver()
            await self._stopped.wait()
            self._dismiss_standby()
            returning.close()
            for task in background:
                task.cancel()
            if watch is not None:
                loop.remove_reader(watch)
                os.close(watch)
            door.close()
            self.listening.close()
            for link in self.connection_limit.links():
                link.close()
            self.role.close()
            await asyncio.sleep(0)
            await self._close_journal()
            if self.engine is not None:
                await self.engine.close()
            if self.arenas is not None:
                await self.arenas.close()
        finally:
            self._dismiss_standby()
            if self._metrics is not None:
                self._metrics.close()

    async def _open_backend(self) -> None:
        """Where large rows lie, and how they travel: for the whole job, so only its first server may do without, and
        none whose journal names blocks that lie there."""
        num_there = len(self.service.unit.in_engine())
        if num_there and not self.config.engine:
            text = f"the journal names {num_there} blocks in a storage engine; expected the one that it was begun with"
            raise ConfigError(f"backend.storage_backend: {text}")
        try:
            if self.config.engine and isinstance(self.role, ControllerNode):
                self._use(await opened_engine(self.config, self.service, self.role.controller))
            await self._open_transport()
        except TransferQueueError as error:
            if self.config.backend_required or self.config.join or num_there:
                raise
            self._remark = f"SimpleStorage takes the place of what backend.storage_backend says: {error}"
            log.warning("%s", self._remark)

    def _use(self, engine: EngineBlocks) -> None:
        self.engine = self.service.blocks.engine = engine
        self._due.append(engine.work)
        if isinstance(self.service.unit, KeptUnit):
            self.service.unit.can_delete = engine.work
        engine.work()

    async def _open_transport(self, again: bool = False) -> None:
        """The one of the job: the controller says which. A server that takes over serves without it if need be."""
        told, host = self.config.transport, self.config.host
        if isinstance(self.role, StorageNode):
            own = told.get("settings", {}).get("local_hostname", "")
            told = self.role.client_config.get("transport", {})
            told = told and {**told, "settings": {**told["settings"], "local_hostname": own}}
        if not told:
            return
        try:
            self.arenas = await opened_transport(told, advertised(host) or "127.0.0.1", self.service.unit, not again)
        except TransferQueueError as error:
            if not again:
                raise
            log.error("rows of this host reach others over the service's connections only: %s", error)
            self.arenas = None
        self.service.blocks.registered = self.arenas
        self._due += [] if self.arenas is None else [self.arenas.work]

    def _start_standby(self) -> None:
        if self._has_standby:
            self._keeper = StandbyKeeper(self.service, self.recorder, self._kept, self._take_over)
            self._keeper.renew()

    def _dismiss_standby(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    def _kept(self) -> list[int]:
        """What a standby needs to serve."""
        journal = [] if self.journal is None else self.journal.held
        return [*self.listening.descriptors(), self.config.life, *journal]

    def _take_over(self) -> NoReturn:
        """In the standby: go on where the server was killed. Its event loop, and all that belonged to it, is gone."""
        now = time.monotonic()
        # Whose last reference goes is taken apart, and would close a number that is somebody else's by now.
        self._former.append((self.connection_limit, self.turns, self._timer, self._keeper, self._metrics, self.arenas))
        self._due.clear()
        self.connection_limit = ConnectionLimit(most_connections())
        self.turns, self.spinner = Turns(), Spinner(self.config.spin_s)
        self._predecessor = self._keeper
        self._timer, self._tidying, self._keeper, self._metrics = None, False, None, None
        self._clock.next_look = math.inf
        self.role.start_over(now)
        self.service.takeovers += 1
        for arena in self.service.unit.shm.arenas:
            arena.unreserve()
        run_loop(self._go_on())
        os._exit(0)

    async def _go_on(self) -> None:
        self._begin()
        try:
            reopening = asyncio.get_running_loop().create_task(self._reopen_engine())
            await self._open_transport(again=True)
            await self._serve(None)
            reopening.cancel()
        finally:
            self._leave()

    async def _reopen_engine(self) -> None:
        """Until it is open, what nobody needs stays there, and who misses a block hears that the engine does not
        answer."""
        before = self.engine
        while before is not None:
            try:
                self._use(await reopened(before))
                break
            except TransferQueueError as error:
                log.error("the next attempt is in %g s: %s", REOPEN_S, error)
            await asyncio.sleep(REOPEN_S)
        self._former.append(before)

    def _leave(self) -> None:
        """Nothing of it is left."""
        self.service.unit.close()
        clear_run_dir(self.config.run_dir)
        host_registry.leave(self._entry)

    def _advertised(self, tcp: str) -> str:
        """Where other hosts reach this one; where it listens everywhere without a host, which the controller adds."""
        return f":{tcp.rpartition(':')[2]}" if is_everywhere(self.config.host) else tcp

    async def _listen_at(self, host: str) -> str:
        """Where others reach this unit, whose host has the address `host` by now: nobody chose another one."""
        if not await self.listening.move(host):
            return self.listening.tcp_name
        self.config = msgspec.structs.replace(self.config, host=host)
        self.service.tcp = tcp = self.listening.tcp_name
        log.warning("this host has another address: its unit is at %s from now on", tcp)
        if self._entry:
            host_registry.leave(self._entry)
            self._entry = self._enter(self.listening.path, tcp)
        if self._metrics is not None:
            self._metrics.close()
            await self._open_metrics(required=False)
        if self._keeper is not None:
            self._keeper.renew()  # the standby of before has another socket
        return tcp

    async def _open_metrics(self, required: bool) -> None:
        """Serve metrics where they are enabled; the library for it is loaded only then."""
        if not isinstance(self.service, MeteredService):
            return
        from transfer_queue.server.metrics.collector import ServerCollector
        from transfer_queue.server.metrics.http import Endpoint

        endpoint = Endpoint(ServerCollector(self.service, self.role))
        host = self.config.metrics_host or ("" if is_everywhere(self.config.host) else self.config.host)
        try:
            await endpoint.open(host, self._metrics_port)
        except ConfigError as error:  # somebody took the port meanwhile
            if required:
                raise
            log.warning("metrics are not served any more: %s", error)
            return
        self._metrics_port, self._metrics = endpoint.port, endpoint

    def _local(self) -> ServerConnection:
        return ServerConnection(self, ("", ""), local=True)

    def _remote(self) -> ServerConnection:
        return ServerConnection(self, (self.config.token, self.config.unit_token), local=False)

    def stop(self) -> None:
        self._stopped.set()

    def welcome(self, local: bool) -> Welcome:
        """A local client also learns the token, to read from units of other hosts."""
        door = os.path.join(self.config.run_dir, DOOR_NAME) if local else ""
        own = {"metrics_endpoint": self._metrics.address} if self._metrics is not None else {}
        config = {"metrics_endpoint": None, **self.role.client_config, **own, "unit": self.service.unit.number}
        if local:
            config["token"] = self.config.token
        if self.engine is not None:
            config["engine"] = self.engine.told()
        if self.arenas is not None:
            config["transport"] = self.arenas.told()
        if self._remark:
            config["remark"] = self._remark
        return Welcome(os.getpid(), door, json.dumps(config).encode(), *self.service.life)

    def of_unit(self, message: Request, host: str, line: UnitConnection) -> Reply:
        return self.role.of_unit(message, host, line, self.now())

    def deliver(self) -> None:
        """Send the answers of parked requests that have one now, and keep the timer on the next deadline."""
        told = set()
        for ticket, answer in self.service.answered(time.monotonic()):
            told.add(link := cast(ServerConnection, ticket[0]))  # type: ignore[index]
            link.answer_parked(ticket, answer)
        for link in told:
            link.write_gathered()
        self.role.work()
        for look in self._due:
            look()
        if self.service.recycler and not self._tidying:
            self._tidying = True
            asyncio.get_running_loop().call_soon(self._tidy)
        deadline = self.service.next_deadline()
        if deadline is None or (self._timer is not None and deadline == self._wake_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        now = time.monotonic()
        self._wake_at, self._clock.next_look = deadline, max(deadline, now)
        self._timer = asyncio.get_running_loop().call_later(self._clock.next_look - now, self._expire)

    def _stood_still(self, seconds: float) -> None:
        for owner in (self.service.controller, self.service.members, self.service.sessions):
            owner.postpone(seconds)

    def _expire(self) -> None:
        now, self._timer = self.now(), None
        self._clock.next_look = math.inf
        self.service.expire(now)
        self.deliver()

    def _tidy(self) -> None:
        """Do some of what is left to do; the loop looks after its connections before it goes on."""
        self._tidying = False
        until = time.monotonic() + TIDY_S
        while self.service.recycler and time.monotonic() < until:
            self.service.tidy()
        self.deliver()

    async def _trim(self) -> None:
        """Every `trim_after_s`, return the memory that the last two periods did not need."""
        unit = self.service.unit
        while True:
            await asyncio.sleep(self.config.trim_after_s)
            peak, unit.peak_nbytes = unit.peak_nbytes, unit.used_nbytes
            unit.trim(max(peak, self._recent_peak))
            self._recent_peak = peak

    async def _linger(self, linger_s: float) -> None:
        """Stop once nobody has been attached for `linger_s`."""
        used = time.monotonic()
        while time.monotonic() - used < linger_s:
            await asyncio.sleep(linger_s / 10)
            if self.service.sessions.by_ident:
                used = time.monotonic()
        self.stop()

    def _watch_owner(self, loop: asyncio.AbstractEventLoop) -> int | None:
        """Stop when the owner ends. The descriptor of a process becomes readable then (pidfd_open(2))."""
        owner, start = self.config.owner_pid, self.config.owner_start
        if not owner:
            return None
        try:
            watch = os.pidfd_open(owner)
        except ProcessLookupError:
            self.stop()
            return None
        loop.add_reader(watch, self.stop)
        found = processes.identity_of(owner)
        if start and found is not None and found.start != start:
            self.stop()  # the owner has ended, and another process has its number
        return watch

    def _enter(self, path: str, tcp: str) -> str:
        """Enter the register, so that this user's commands and the owner's children find this server."""
        config = self.config
        shares = bool(config.job and tcp and not config.join)
        try:
            return host_registry.enter(
                host_registry.ServerEntry(
                    server=processes.identity_of(os.getpid()) or processes.ProcessIdentity(os.getpid(), 0),
                    address=f"unix:{os.path.abspath(path)}",
                    owner=processes.identity_of(config.owner_pid) if config.owner_pid else None,
                    since=processes.now(),
                    tcp=tcp,
                    join=config.join,
                    job=config.job,
                    token=config.token if shares else "",
                    unit_token=config.unit_token if shares else "",
                )
            )
        except OSError as error:
            log.warning("this server is in no register, and found by its address only: %s", error)
            return ""

    def _announce(self, descriptor: int, path: str, tcp: str) -> None:
        """Tell the starter, unless it has ended, and let go of its lock: who waits for that finds this server."""
        ready = Ready(pid=os.getpid(), unix=path, tcp=tcp)
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptor, msgspec.json.encode(ready) + b"\n")
        if descriptor > 2:
            os.close(descriptor)
        if self.config.lock >= 0:
            os.close(self.config.lock)


def _host_towards(join: str) -> str:
    try:
        return host_towards(parse_address(join))
    except OSError as error:
        raise ConfigError(f"no way to {join}: {error}") from error


def serve(config: ServerConfig, announce: int) -> None:
    """Run a server in this process until it is stopped."""
    logging.basicConfig(level=config.logging_level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    with processes.ending_with(config.owner_pid):
        server = Server(config)
    gc.freeze()
    # Replies are trees of small objects without cycles. A new table's lists should be old before they are long: the
    # collector looks at every row of a young one, while others wait.
    gc.set_threshold(10_000, 5, 400)
    run_loop(server.run(announce))


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run an event loop until `main` is done."""
    try:
        import uvloop

        runner = uvloop.run
    except ImportError:
        runner = asyncio.run
    runner(main)


def main() -> None:
    """Entry of the child process: the config comes as JSON on standard input, the addresses go to standard output.

    Nothing else does: what a sampler prints goes to standard error.
    """
    announce = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig)
    try:
        serve(config, announce)
    except TransferQueueError as error:  # the configuration, a user's sampler, a service that cannot be joined
        log.debug("not started", exc_info=True)
        os.write(announce, msgspec.json.encode(NotStarted(code=error.code, text=str(error))) + b"\n")
        sys.exit(1)
