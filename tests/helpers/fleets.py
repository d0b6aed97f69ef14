"""Replicas in this process, with faults on the way to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from weights import Net, copy_of, drawn, root

from transfer_queue.errors import ServiceUnavailable
from transfer_queue.weights import Control, Gate, InPlace, Receiver, StateDictSource
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.trainer import TrainerEngine

SEND_S = 10.0


class Server:
    """A server whose process may end: `restart` begins with weights of its own."""

    def __init__(self, engine: str = "shm") -> None:
        self.engine_name = engine
        self.down = False
        self.faults: dict[str, Exception] = {}  # by call, each raised once
        self.hooks: dict[str, Callable[[], object]] = {}
        self.released = threading.Event()
        self.restart()

    def restart(self) -> None:
        self.stop()
        self.module = Net()
        self.gate = Gate()
        self.receiver = Receiver(InPlace(self.module), adapter=lambda tensors, manifest: None)
        self.engine = registry.engine(self.engine_name)(self.receiver)
        self.control = Control(self.engine, self.receiver, generation=self.gate)
        self.down = False

    def stop(self) -> None:
        if "engine" in vars(self):
            self.engine.shutdown()
            self.control.resume_generation()  # the lease of a pause ends with the process
        self.down = True

    def root(self) -> str:
        """What its weights really are."""
        with self.receiver.reading() as live:
            return root(copy_of(live.module))

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.down:
                raise ServiceUnavailable("nobody listens")
            if name in self.hooks:
                self.hooks[name]()
            if error := self.faults.pop(name, None):
                raise error
            return getattr(self.control, name)(*args)

        return call


class Source:
    """Weights that the test chooses."""

    def __init__(self) -> None:
        self.seed = 0

    def _now(self) -> StateDictSource:
        return StateDictSource(drawn(Net(), self.seed))

    def specs(self) -> Any:
        return self._now().specs()

    def tensors(self) -> Any:
        return self._now().tensors()

    def aliases(self) -> dict[str, str]:
        return self._now().aliases()


class Site:
    """A trainer, its fleet and servers a, b, c..."""

    def __init__(self, num: int = 2, engine: str = "shm", info: dict[str, Any] | None = None, **settings: Any) -> None:
        self.engine = engine
        self.info = {"bucket_nbytes": 128, **(info or {})}
        self.servers = {chr(ord("a") + number): Server(engine) for number in range(num)}
        self.fleet = Fleet(self.servers, **{"heartbeat_s": 0.02, "call_timeout_s": 5.0, **settings})
        self.source = Source()
        self.trainer: TrainerEngine | None = None
        self.start_trainer()

    def start_trainer(self) -> None:
        if self.trainer is not None:
            self.trainer.shutdown()
            self.trainer = None
        self.trainer = registry.trainer(self.engine).trainer_init(self.info, client=self.fleet, source=self.source)

    def send(self, seed: int, deadline_s: float = SEND_S) -> Any:
        assert self.trainer is not None
        self.source.seed = seed
        return self.trainer.send_weights(deadline_s=deadline_s)

    def add(self, name: str, wait_s: float | None = SEND_S) -> Server:
        self.servers[name] = Server(self.engine)
        self.fleet.join(name, self.servers[name], wait_s=wait_s)
        return self.servers[name]

    def roots(self) -> dict[str, str]:
        return {name: one.root() for name, one in self.servers.items()}

    def close(self) -> None:
        for one in self.servers.values():
            one.released.set()
        self.fleet.close()
        for one in self.servers.values():
            one.stop()
        if self.trainer is not None:
            self.trainer.shutdown()


def expected(seed: int) -> str:
    return root(drawn(Net(), seed))


torch.set_num_threads(1)
