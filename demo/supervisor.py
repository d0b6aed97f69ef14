"""Who watches the workers: starts them, notices when one is killed, and starts another."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from types import TracebackType

import transfer_queue as tq
from demo import reference, reward, rollout, trainer
from demo.board import Board, Incident
from demo.checkpoint import Checkpoint
from demo.fleet import Death, Fleet, Target, WorkerFailed
from demo.settings import Settings
from demo.tables import REPLICAS

_TARGETS: dict[str, Target] = {
    "trainer": trainer.run,
    "rollout": rollout.run,
    "reward": reward.run,
    "reference": reference.run,
}

_NOTICED_S, _AGAIN_S = 10.0, 0.005  # the service notices an end when its connections close


class Supervisor:
    """A context: on leaving it, in whatever way, no worker is left. It needs the service that the workers share."""

    def __init__(self, settings: Settings, board: Board) -> None:
        self._settings = settings
        self._kills = settings.kills
        self._board = board
        self._fleet = Fleet(settings.folder / "logs", on_death=self._replace)
        self._service_killed_s = time.monotonic()

    def start(self) -> None:
        """All workers; an earlier run's checkpoint goes."""
        Checkpoint(self._settings.folder / "trainer", self._settings.run_id).forget()
        for name in self._settings.worker_names:
            self._start(name)

    def watch(self, timeout_s: float) -> bool:
        """Wakes when a worker ends, at the latest after `timeout_s`. True when all have ended well.

        Raises `WorkerFailed` for one that raised, and for one that is killed too often.
        """
        done = self._fleet.wait(timeout_s)
        every_s = self._settings.kill_service_s
        if every_s is not None and time.monotonic() - self._service_killed_s > every_s:
            self._kill_service()
        self._board.pids = self._fleet.pids()
        return done

    def _lives(self, name: str) -> int:
        """How many processes of this name have begun, or are about to end."""
        return 1 + sum(one.name == name for one in self._board.incidents)

    def _kill_service(self) -> None:
        """Its standby takes over; nobody has to do anything for that."""
        client = tq.get_client()
        pid = client.stats()["pid"]
        noticed_s = self._service_killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        client.stats()
        self._board.incidents.append(
            Incident(
                name="service",
                pid=pid,
                reason="SIGKILL",
                noticed_s=noticed_s,
                step=self._board.step,
                rows=0,
                life=self._lives("service"),
                worked_s=time.monotonic(),
            )
        )

    def __enter__(self) -> Supervisor:
        self._fleet.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._fleet.__exit__(kind, error, traceback)

    def _start(self, name: str) -> None:
        target = _TARGETS[name.split()[0]]
        self._fleet.start(name, target, name, replace(self._settings, kills=self._kills))
        self._board.pids = self._fleet.pids()

    def _replace(self, death: Death) -> None:
        """A worker was killed: note it, start another."""
        noticed_s = time.monotonic()
        self._board.refresh()
        lives = self._lives(death.name)
        if lives > self._settings.max_restarts:
            raise WorkerFailed(
                f"worker {death.name!r} was ended by {death.reason}, for the {lives}th time\n{death.last_output}"
            )
        rows = recover(death.name, death.pid)
        own = next((kill for kill in self._kills if kill.worker == death.name), None)
        self._kills = tuple(kill for kill in self._kills if kill is not own)
        self._board.incidents.append(
            Incident(
                name=death.name,
                pid=death.pid,
                reason=death.reason,
                noticed_s=noticed_s,
                step=self._board.step,
                rows=rows,
                life=lives,
            )
        )
        self._start(death.name)


def recover(name: str, pid: int) -> int:
    """What there is to do for a worker that is dead: its leases end with it, its address has not. Returns how many rows
    it had on lease and not acknowledged.
    """
    if name in tq.kv_list(REPLICAS).get(REPLICAS, {}):
        tq.kv_clear(keys=[name], partition_id=REPLICAS)
    client, until = tq.get_client(), time.monotonic() + _NOTICED_S
    seen = client.overview()
    while any(one.pid == pid for one in seen.sessions) and time.monotonic() < until:
        time.sleep(_AGAIN_S)
        seen = client.overview()
    return sum(back.rows for one in seen.departures if one.pid == pid for back in one.given_back)
