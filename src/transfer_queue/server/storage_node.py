"""A unit's membership: joining the controller's server, staying joined, and doing what it asks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from transfer_queue.errors import InvalidInput, ServiceUnavailable, TransferQueueError, error_from_code
from transfer_queue.memory.bytes import Ints
from transfer_queue.server.compaction import Compactor
from transfer_queue.server.controller_proxy import ControllerProxy
from transfer_queue.server.copies import kept_first
from transfer_queue.server.gathering import Gatherer
from transfer_queue.server.journal.kept_member import Membership
from transfer_queue.server.service import Service
from transfer_queue.server.settings import AWAY_S
from transfer_queue.server.spilling import Spiller
from transfer_queue.server.standby.recording import Recorder, RecordingProxy
from transfer_queue.server.unit_registry import UnitConnection, numbers
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire import handshake
from transfer_queue.wire import messages as m
from transfer_queue.wire.address import Address
from transfer_queue.wire.aio import AsyncConnection
from transfer_queue.wire.arrays import numbers_of

log = logging.getLogger("transfer_queue.server")

CONNECT_S = 5.0
REPLY_S = 10.0
AGAIN_S = 0.25
REPORT_S = 1.0
MAX_TOLD = 64  # of those who wait for room
TAKEN_S = 2.0  # for so long a unit that starts is refused where the one before it may not be known to be gone


class StorageNode:
    """`unit` as a member of the service at `controller`, which waits for its rows for `away_s` when it is away.
    `deliver` is called when answers or work came from there. `reached_from`: the address to join under, where that
    follows the one of this host which the connection comes from.

    The unit token is for the membership alone; what clients ask is passed on with theirs, which `controller` has.
    """

    def __init__(
        self,
        controller: Address,
        unit_token: str,
        unit: Unit,
        deliver: Callable[[], None],
        make: Callable[[ControllerProxy, Unit], Service] = Service,
        recorder: Recorder | None = None,
        away_s: float = AWAY_S,
    ) -> None:
        self.remote = (
            ControllerProxy(controller, self._answered)
            if recorder is None
            else RecordingProxy(controller, self._answered, recorder)
        )
        self.service = make(self.remote, unit)
        self._controller = controller._replace(token=unit_token)
        self._address = ""
        self.reached_from: Callable[[str], Awaitable[str]] | None = None
        self._has_joined = False
        self._deliver = deliver
        self._recorder = recorder
        self._away_s = away_s
        self.membership = Membership(unit.number, self.service.life.unit, b"")
        self.client_config: dict[str, Any] = {}
        self._connection: AsyncConnection | None = None
        self._former: list[object] = []  # see `ControllerProxy`
        self._rid = 0
        self._begin()

    def _begin(self) -> None:
        """On this event loop."""
        self.compactor = Compactor(self.service, self._moved)
        self.gatherer = Gatherer(self.service, self._gathered)
        self.spiller = Spiller(self.service, self._spilled)
        self._lost = asyncio.Event()
        self._resolving: asyncio.Task[None] | None = None

    def start_over(self, now: float) -> None:
        """Go on, in a process that takes over: `stay` joins again as the unit that was there."""
        self._former.append((self.compactor, self.gatherer, self.spiller, self._connection, self._resolving))
        self._connection = None
        self._rid += 1 << 32  # what the one before asked since this process was forked is not known here
        self.remote.start_over(self.service.sessions.by_ident)
        self._begin()
        self._lost.set()
        self.service.lose_connections(were_passed_on=True)

    async def join(self, address: str) -> None:
        """Join as the unit that readers of other hosts reach at `address`.

        Raises `ServiceUnavailable`, `AccessDenied`, `DeadlineExceeded`; `InvalidInput` where a unit is at that address
        already, or the journal of this one is of another service.
        """
        self._address = address
        await self.remote.check()
        deadline = time.monotonic() + TAKEN_S
        while True:
            try:
                return await self._join()
            except InvalidInput:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(AGAIN_S)

    async def _join(self) -> None:
        """Join, or join again. Where another life of the controller answers, none of the rows here is one of its."""
        self._lost.clear()
        before, self._connection = self._connection, None
        if before is not None:
            before.close()
        connection = AsyncConnection(
            self._controller, m.decode_server, self._pushed, lambda: self._lost_one(connection)
        )
        await connection.open(self.service.life.unit, CONNECT_S, role=handshake.UNIT)
        if self.reached_from is not None:
            self._address = await self.reached_from(connection.own_host)
        self._connection = connection
        await self._offer_blocks(connection.welcome)

    def _lost_one(self, connection: AsyncConnection) -> None:
        if self._connection is connection:
            self._lost.set()

    async def _offer_blocks(self, welcome: m.Welcome) -> None:
        unit, life = self.service.unit, self.service.life.unit
        if welcome.service != self.remote.life.service:
            if self._recorder is not None:
                self._recorder.leave_out()  # all of it is of another life from now on
            self.service.life = handshake.Life(welcome.service, life)
            self.remote.begin(welcome.service)
            unit.rest_again()
            self.client_config = json.loads(welcome.config)
            self.remote.timeout_s = float(self.client_config["timeout_s"])
            if "engine" in self.client_config:
                self.client_config["engine"]["books"] = str(self._controller)
        begins_with = b"" if self._has_joined else self.membership.service  # then the blocks are all that there are
        doubtful = set() if begins_with else set(self.service.pending.in_doubt)  # a commit may still be on its way
        published = [number for number in unit.published() if number not in doubtful]
        self.service.pending.join_again()
        joined = await self._ask(self._offer(published, begins_with))
        if isinstance(joined, m.Failed):
            raise error_from_code(joined.code, joined.text)
        if not isinstance(joined, m.Joined):
            raise ServiceUnavailable(f"the controller at {self._controller} took no unit: {joined}")
        if joined.unit != unit.number:
            self._renumber(joined.unit)
        self._has_joined = True
        self.membership = Membership(joined.unit, self.membership.incarnation, welcome.service)
        self._drop(joined.gone)
        await self._resolve_in_doubt()
        await self.remote.attend(one.ident for one in self.service.sessions.by_ident.values() if one.local)

    def _offer(self, published: list[int], service: bytes) -> m.Join:
        return m.Join(
            self._next_rid(), self.membership.incarnation, self._address, numbers(published),
            self._recorder is not None, self._away_s, self.service.journal is not None, service,
        )  # fmt: skip

    def _renumber(self, number: int) -> None:
        """The controller does not know this unit, or not any more."""
        if self._recorder is not None:
            self._recorder.leave_out()
        gone = self.service.unit.published()
        if gone:
            log.error("the controller at %s gave this unit up: %d blocks are gone", self._controller, len(gone))
        self.service.unit.renumber(number)

    async def stay(self) -> None:
        """Join again whenever the connection is lost; never returns."""
        while True:
            await self._report_until_lost()
            if self._connection is not None:
                log.warning("lost the controller at %s", self._controller)
            while self._lost.is_set():  # a standby may listen already
                try:
                    await self._join()
                    self._deliver()  # whoever waits for memory, or was passed on to another life
                    log.warning("joined the controller at %s again", self._controller)
                except TransferQueueError as error:
                    log.info("cannot join: %s", error)
                    self._lost.set()
                    await asyncio.sleep(AGAIN_S)

    async def _report_until_lost(self) -> None:
        """Tell how this unit is, for those who look at the service. What did not change is told once."""
        told = None
        while not self._lost.is_set():
            unit, now = self.service.unit, time.monotonic()
            counts = {
                "arena_nbytes_used": unit.used_nbytes, "arena_nbytes_budget": unit.budget_nbytes,
                "spill_nbytes_used": unit.spilled_nbytes, "spill_nbytes_budget": unit.spill.budget_nbytes,
            }  # fmt: skip
            report = counts, unit.num_waiting, unit.waits(MAX_TOLD, now)
            if report != told:
                with contextlib.suppress(TransferQueueError):  # then it is told a second later, or is lost
                    await self._ask(m.ReportUnit(self._next_rid(), *report))
                    told = report
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._lost.wait(), REPORT_S)

    def _answered(self) -> None:
        """The controller answered: its answers take effect here before they are passed on."""
        self.service.apply_outcomes()
        self._deliver()

    def work(self) -> None:
        """What became due while messages were handled."""
        self.spiller.look()
        if self.service.pending.in_doubt and not self._lost.is_set() and self._resolving is None:
            self._resolving = asyncio.get_running_loop().create_task(self._resolve_in_time())

    async def _resolve_in_time(self) -> None:
        try:
            with contextlib.suppress(TransferQueueError):  # else when the unit joins again
                await self._resolve_in_doubt()
                self._deliver()
        finally:
            self._resolving = None

    async def _resolve_in_doubt(self) -> None:
        """Ask what became of the commits that got no answer, and recycle the blocks of those that failed."""
        pending = self.service.pending
        in_doubt = set(pending.in_doubt)
        if not in_doubt:
            return
        reply = await self._ask(m.ResolveCommits(self._next_rid(), numbers(in_doubt)))
        if not isinstance(reply, m.Blocks):
            raise ServiceUnavailable(f"the controller at {self._controller} does not say: {reply}")
        pending.in_doubt = [number for number in pending.in_doubt if number not in in_doubt]
        self._drop(reply.numbers)

    async def _moved(self, block: int, target: int, rows: Ints) -> bool:
        """Whether the controller took `target` in the place of `block`."""
        return await kept_first(self.service, target) and isinstance(
            await self._ask(m.Moved(self._next_rid(), block, target, rows.tobytes())), m.Done
        )

    async def _gathered(self, target: int, blocks: Ints, rows: Ints) -> bool:
        """Whether the controller took rows of `target` in the place of `blocks`."""
        if not await kept_first(self.service, target):
            return False
        request = m.Gathered(self._next_rid(), target, blocks.tobytes(), rows.tobytes())
        return isinstance(await self._ask(request), m.Done)

    async def _spilled(self, block: int, target: int, rows: Ints) -> bool:
        """As `_moved`, of a copy."""
        if self.service.journal is not None:
            self.service.journal.copied(block, target)
        return await self._moved(block, target, rows)

    def of_unit(self, message: m.Request, host: str, line: UnitConnection, now: float) -> m.Reply:
        return m.Failed(message.rid, InvalidInput.code, f"units join the controller at {self._controller}")

    async def _ask(self, request: m.Request) -> m.Reply:
        if self._connection is None:
            raise ServiceUnavailable(f"the controller at {self._controller} was not joined again yet")
        if self._recorder is not None:
            self._recorder.settle()  # what it is told has happened here, whoever is killed next
        reply: m.Reply = (await self._connection.call(request, None, REPLY_S))[0]
        return reply

    def _next_rid(self) -> int:
        self._rid += 1
        return self._rid

    def _pushed(self, message: m.Message) -> None:
        match message:
            case m.Drop(blocks=blocks):
                self._drop(blocks)
            case m.SparseBlock(block=block, rows=rows, fields=fields):
                self.compactor.start(block, numbers_of(rows), fields)
            case m.GatherRows(blocks=blocks, rows=rows):
                self.gatherer.start(numbers_of(blocks), numbers_of(rows))
        self._deliver()

    def _drop(self, blocks: bytes) -> None:
        self.remote.freed.extend(numbers_of(blocks).tolist())
        self.service.apply_outcomes()

    def close(self) -> None:
        self.gatherer.close()
        self.spiller.close()
        self.remote.close()
        if self._connection is not None:
            self._connection.close()
