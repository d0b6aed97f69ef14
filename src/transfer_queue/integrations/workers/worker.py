"""The four calls of an engine in a worker of an inference server.

A call that raises in a worker puts it out of step with the others (vLLM), or ends the server (SGLang). So nothing
raises here: faults are recorded and reported to the trainer, and `finish` commits or does nothing. A call keeps the
worker from generating, so all but the commit goes on in a thread beside it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import CommitFailed, DeadlineExceeded
from transfer_queue.integrations.workers.lane import Lane, silent
from transfer_queue.integrations.workers.ranks import Ranks
from transfer_queue.integrations.workers.reloading import ReloadTarget
from transfer_queue.weights.receive.receiver import AdapterSink, Receiver, VersionInfo
from transfer_queue.weights.receive.update_session import CALLED_OFF, begun_of, run_of, timeout_of
from transfer_queue.weights.transport.registry import engine

log = logging.getLogger("transfer_queue.weights")
FINISH_S = 300.0  # how long `finish` waits for an update that gives no time of its own
LEAVE_S = 2.0


class SilentWorker:
    """One for each worker; `rank` tells it from the others of its server. `transport` names the engine that brings the
    bytes. Every worker of a server gets the same calls."""

    def __init__(
        self, transport: str, target: ReloadTarget, ranks: Ranks, rank: int, adapter: AdapterSink | None = None
    ) -> None:
        self.target = target
        self._ranks = ranks
        self._receiver = Receiver(target, adapter=adapter)
        self._engine = engine(transport)(self._receiver, rank=rank, on_fault="record")
        self._engine.confine()  # a worker cannot tell who calls: the server's routes, or the process that made it
        self._lane = Lane()
        self._patience_s = FINISH_S
        self._is_sent = False  # a version, and nothing has ended its update; by the calls, which all workers get alike

    def installed(self) -> VersionInfo:
        return self._receiver.installed()

    def would_refuse(self, init_info: Any) -> bool:
        """Whether it is the introduction of a run that is over, which changes nothing."""
        return self._receiver.would_refuse(run_of(init_info), begun_of(init_info))

    @silent
    def init_transfer_engine(self, init_info: Any) -> None:
        self._receiver.introduce(run_of(init_info), begun=begun_of(init_info))
        self._give_up("another trainer came")
        self._lane.add(self._engine.init_transfer_engine, init_info)

    @silent
    def start_weight_update(self) -> None:
        self._patience_s, self._is_sent = FINISH_S, False
        self._receiver.end("another update started")
        self._receiver.begin()
        self._lane.add(self._engine.start_weight_update)

    @silent
    def update_weights(self, update_info: Any) -> None:
        """Begins; the trainer hears when the version is verified."""
        self._receiver.expect_run(run_of(update_info))
        if isinstance(update_info, Mapping) and update_info.get("abort"):
            self._give_up(CALLED_OFF)
            return
        self._patience_s, self._is_sent = timeout_of(update_info, FINISH_S), True
        self._lane.add(self._engine.update_weights, update_info)

    @silent
    def finish_weight_update(self) -> None:
        """Commit, if every worker of this server can; otherwise none does. All of them had the same calls: where one of
        these ended the update, nobody has anything to do, and nobody asks the others. A fault that a worker met by
        itself is no such end: the others ask it. Whatever it finds, a worker speaks twice then: one that is late is
        waited for no longer by some, and still meets what they said."""
        if not self._is_sent:
            return
        self._is_sent = False
        self.target.voted = False
        done = self._lane.ended(self._patience_s)
        if not self._ranks.same(_number(self._engine.ready) if done else 0):
            self._give_up("not every worker of this server can take it")
            self._lane.add(self._engine.refuse, CommitFailed("not every worker of this server can take it"))
        elif not done:
            self._lane.add(self._engine.refuse, DeadlineExceeded("the update did not arrive in time"))
        elif not self._engine.ready:
            self._engine.finish_weight_update()
        else:
            self._commit()
        if not self.target.voted:
            self._ranks.all(False)

    def _commit(self) -> None:
        start = time.monotonic()
        self._engine.finish_weight_update()
        if not self.target.voted:  # the others wait for what this one says
            self.target.voted = True
            self._ranks.all(self._engine.outcome.installed)
        self._committed()
        log.info("%s after %.3f s", self.installed(), time.monotonic() - start)

    @silent
    def shutdown(self) -> None:
        self._is_sent = False
        self._receiver.end("shut down")
        self._lane.add(self._engine.shutdown)
        self._lane.close(LEAVE_S)

    def _committed(self) -> None:
        """`finish` has committed, or tried to."""

    def _give_up(self, why: str) -> None:
        """Drop the open update, also one that is being received."""
        self._is_sent = False
        self._receiver.end(why)
        self._lane.add(self._engine.update_weights, {"abort": True})


def _number(key: str) -> int:
    """The manifest's name, short enough for an exchange; 0 for none."""
    return int(key[:15], 16) + 1 if key else 0
