"""The trainer's way to the rollout workers: every version of the policy goes to all of them, whatever they do.

It is packed, and travels while the trainer goes on: until the policy is changed, which waits for it. They come and go,
so the trainer engine's client is a `Fleet`: who dies is left out, who comes late is brought up.
"""

from __future__ import annotations

import math
import time

from torch import nn

import transfer_queue as tq
from demo.line import Caller
from demo.port import Doing, Port
from demo.settings import Settings
from demo.tables import REPLICAS
from transfer_queue.errors import TransferQueueError
from transfer_queue.weights import ModuleSource
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.ticket import PublishTicket
from transfer_queue.weights.transport.trainer import TrainerEngine

_DEADLINE_S = 60.0
_CALL_S = 30.0
_HEARTBEAT_S = 0.5
_AGAIN_S = 0.02
_GLANCE_S = 0.5
_MEET_EVERY_S = 0.5


class Publisher:
    """Sends `policy` to the rollout workers that there are. One life of the trainer, to them."""

    def __init__(self, port: Port, policy: nn.Module, settings: Settings) -> None:
        self._port = port
        self._source = ModuleSource(policy)
        self._settings = settings
        # Not fenced by a pause: a trainer that is killed while one lasts would leave the worker frozen for good.
        self._fleet = Fleet(
            fence=None, heartbeat_s=_HEARTBEAT_S, call_timeout_s=_CALL_S, catch_up_timeout_s=_DEADLINE_S
        )
        self._callers: dict[str, Caller] = {}
        self._trainer: TrainerEngine | None = None
        self._version = 0
        self._met_s = -math.inf
        self._deadline = math.inf
        self._ticket: PublishTicket | None = None  # None: it is to be sent again

    def publish(self, version: int) -> None:
        """Announce the weights as they are now, and begin to send them; returns when they are packed. They may not
        change before `settle`.

        It is announced first: workers that may start more samples now do so with the old weights, and get the new ones
        between two tokens. Such samples count as one version older.

        Announced is the run's own name for them: the version of a number is the same whichever process sends it. To
        announce another epoch for each process would make every row that waits one version older than it is.
        """
        with self._port.spending(Doing.WEIGHTS):
            tq.set_weight_version(version, self._settings.run_id)
        self._port.pass_by("announced", version - 1)
        self._version, self._deadline = version, time.monotonic() + _DEADLINE_S
        with self._port.spending(Doing.WEIGHTS):
            if time.monotonic() > self._met_s + _MEET_EVERY_S:
                self._meet()
            self._begin()

    def settle(self) -> None:
        """Return when all workers that live have what was published last. What reached nobody is sent again, for a
        minute: then `TimeoutError`."""
        with self._port.spending(Doing.WEIGHTS):
            while not self._arrived():
                if time.monotonic() > self._deadline:
                    raise TimeoutError(f"version {self._version} reached nobody: {self._fleet.status()}")
                if self._ticket is not None:
                    self._ticket.wait(_GLANCE_S)
                    continue
                time.sleep(_AGAIN_S)  # until the parent has noticed who died
                self._meet()
                self._begin()

    def look_around(self) -> None:
        """Take in workers that have come since, forget those that are gone, and send again what reached nobody."""
        with self._port.spending(Doing.WEIGHTS):
            self._meet()
            if not self._arrived() and self._ticket is None:
                self._begin()

    def _meet(self) -> None:
        """The fleet brings those that have come since the newest version."""
        self._met_s = time.monotonic()
        found = {f"{name} {tag['address']}": tag["address"] for name, tag in self._port.tags(REPLICAS).items()}
        for name in self._callers.keys() - found.keys():
            self._fleet.leave(name)
            self._callers.pop(name).close()
        for name in found.keys() - self._callers.keys():
            self._callers[name] = Caller(found[name], self._settings.token, _CALL_S)
            self._fleet.join(name, self._callers[name])

    def close(self) -> None:
        """The workers keep what they have."""
        self._fleet.close()
        for caller in self._callers.values():
            caller.close()
        if self._trainer is not None:
            self._trainer.shutdown()

    def _begin(self) -> None:
        try:
            if self._trainer is None:
                self._trainer = registry.trainer("shm").trainer_init({}, client=self._fleet, source=self._source)
            self._ticket = self._trainer.publish(self._version, deadline_s=_DEADLINE_S)
        except TransferQueueError:
            self._give_up()

    def _arrived(self) -> bool:
        """Whether somebody has it now, or nobody is there to have it."""
        if self._ticket is None or not self._ticket.done:
            return False
        try:
            self._ticket.result()
        except TransferQueueError:
            self._give_up()
        return self._ticket is not None

    def _give_up(self) -> None:
        if self._trainer is not None:
            self._trainer.shutdown()  # its next life may use the number again
        self._trainer = self._ticket = None
