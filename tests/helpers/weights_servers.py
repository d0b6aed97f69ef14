"""Servers of weights, in this process and in processes of their own, that get into trouble when a test says so; and
trainers that stop after one call, to be killed there."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from fleets import Server, Source
from weights import Net, copy_of, root

from transfer_queue.errors import DeadlineExceeded, TransferQueueError
from transfer_queue.weights import Control, Gate, Receiver, Swap
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.http import WeightSyncClient, serve
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.trainer import TrainerEngine

TOKEN = "t"
ENGINE = "tcp"
METHODS = {
    "init": "init_weight_transfer_engine", "start": "start_weight_update", "update": "update_weights",
    "finish": "finish_weight_update", "abort": "abort_weight_update", "status": "status",
    "pause": "pause_generation", "resume": "resume_generation",
}  # fmt: skip
CODE = "import sys; sys.path.insert(0, 'tests/helpers'); import weights_servers; weights_servers.{}()"
Hooks = dict[str, Callable[[], object]]


def run_server() -> None:
    """Serve until stdin ends. Reads the port, prints the URL; says what it serves for each line it is given."""
    torch.set_num_threads(1)
    module, gate = Net(), Gate()
    receiver = Receiver(Swap(module), adapter=lambda tensors, manifest: None)
    control = Control(registry.engine(ENGINE)(receiver), receiver, generation=gate)
    with serve(control, port=int(input()), token=TOKEN) as server:
        print(server.url, flush=True)
        for _ in sys.stdin:
            adapters = sorted(receiver.installed().adapters)
            found = {"root": root(copy_of(module)), "paused": gate.is_paused(), "adapters": adapters}
            print(json.dumps(found), flush=True)


def run_trainer() -> None:
    """Lead servers to version 1 and on, until after the call that is named; says "here" then, and hangs."""
    torch.set_num_threads(1)
    urls, kind, call = json.loads(input())

    def hang() -> None:
        print("here", flush=True)
        threading.Event().wait()

    site = Leading(kind, urls)
    site.send(1)
    site.after[METHODS[call]] = hang
    site.provoke(call)
    threading.Event().wait()  # a fleet asks for the status in a thread of its own, when it is time


class Hooked(WeightSyncClient):
    """Does something before or after a call, once."""

    def __init__(self, *args: Any, before: Hooks, after: Hooks, **more: Any) -> None:
        super().__init__(*args, **more)
        self.before, self.after = before, after

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        name = "status" if name == "statuses" else name
        if name not in METHODS.values():
            return found

        def call(*args: Any) -> Any:
            self.before.pop(name, lambda: None)()
            result = found(*args)
            self.after.pop(name, lambda: None)()
            return result

        return call

    def member(self, name: str) -> WeightSyncClient:
        return WeightSyncClient(name, TOKEN, self._timeout_s)


class Remote:
    """A server in a process of its own, which keeps its port."""

    def __init__(self, child: Callable[[str], Any]) -> None:
        self._child = child
        self.url = ""
        self._start()

    def _start(self) -> None:
        self.process = self._child(CODE.format("run_server"))
        self.process.say(self.url.rpartition(":")[2] or "0")
        self.url = self.process.line()

    def trouble(self, kind: str) -> None:
        if kind == "stopped":
            self.process.freeze()
        else:
            self.process.kill()
        if kind == "restarted":
            self._start()

    def mend(self, kind: str) -> None:
        if kind == "killed":
            self._start()
        if kind == "stopped":
            self.process.process.send_signal(signal.SIGCONT)

    def ask(self) -> dict[str, Any]:
        self.process.say("?")
        found: dict[str, Any] = json.loads(self.process.line())
        return found

    def close(self) -> None:
        self.process.close()


class Local(Server):
    """The same in this process."""

    patience_s = 30.0  # of callers, as the way to a server has a timeout

    def __init__(self) -> None:
        self.going = threading.Event()
        self.going.set()
        self.before: Hooks = {}
        self.after: Hooks = {}
        super().__init__(ENGINE)

    def trouble(self, kind: str) -> None:
        if kind == "stopped":
            self.going.clear()
        elif kind == "killed":
            self.stop()
        else:
            self.restart()

    def mend(self, kind: str) -> None:
        if kind == "killed":
            self.restart()
        self.going.set()

    def stop(self) -> None:
        if "control" in vars(self):
            self.control.resume_generation()  # a process takes its timers along
        super().stop()

    def ask(self) -> dict[str, Any]:
        adapters = sorted(self.receiver.installed().adapters)
        return {"root": self.root(), "paused": self.gate.is_paused(), "adapters": adapters}

    def close(self) -> None:
        self.going.set()
        self.stop()

    def __getattr__(self, name: str) -> Any:
        inner = super().__getattr__(name)

        def call(*args: Any) -> Any:
            self.before.pop(name, lambda: None)()
            if not self.going.wait(self.patience_s):
                raise DeadlineExceeded("no answer")
            result = inner(*args)
            self.after.pop(name, lambda: None)()
            return result

        return call


class Leading:
    """A trainer, and its client ("plain", or a "fleet") to servers; hooks are for the last server."""

    def __init__(self, kind: str, servers: list[Any], deadline_s: float = 20.0) -> None:
        self.kind, self.deadline_s = kind, deadline_s
        self.before: Hooks = {}
        self.after: Hooks = {}
        self.source = Source()
        self.servers = servers
        self.trainer: TrainerEngine | None = None
        self.client: Any = self._client()
        if isinstance(servers[-1], Local):
            servers[-1].before, servers[-1].after = self.before, self.after

    def _client(self) -> Any:
        hooks = {"before": self.before, "after": self.after}
        remote = isinstance(self.servers[0], str)
        if self.kind == "plain":
            return Hooked(self.servers, TOKEN, timeout_s=30.0, **hooks) if remote else self.servers[-1]
        members = self.servers
        if remote:
            members = [WeightSyncClient(url, TOKEN) for url in self.servers[:-1]]
            members.append(Hooked(self.servers[-1], TOKEN, timeout_s=30.0, **hooks))
        named = dict(zip("abc", members, strict=False))
        return Fleet(named, heartbeat_s=0.05, pause="keep")

    def start(self) -> None:
        """A new life of the trainer."""
        if self.trainer is not None:
            self.trainer.shutdown()
            self.trainer = None
        self.trainer = registry.trainer(ENGINE).trainer_init(
            {"timeout_s": self.deadline_s}, client=self.client, source=self.source
        )

    def send(self, seed: int) -> Any:
        if self.trainer is None:
            self.start()
        assert self.trainer is not None
        self.source.seed = seed
        return self.trainer.send_weights(deadline_s=self.deadline_s)

    def provoke(self, call: str, seed: int = 2) -> None:
        """Have that call made, by what makes it."""
        if call == "init":
            self.start()
        if call == "abort":
            assert self.trainer is not None
            self.client.start_weight_update()
            if self.kind == "plain":
                self.client.abort_weight_update()
                return
            with contextlib.suppress(TransferQueueError):  # there is no such version
                run_id, key = self.trainer.run_id, "0" * 32
                self.client.update_weights({"version": 99, "run_id": run_id, "key": key, "timeout_s": 5.0})
            self.client.update_weights({"abort": True})
        elif call in ("status", "pause", "resume") and self.kind == "plain":
            if call == "status":
                (self.client.statuses if isinstance(self.client, Hooked) else self.client.status)()
            else:
                self.client.pause_generation("keep")
                self.client.resume_generation()
        else:
            self.send(seed)

    def close(self) -> None:
        if self.kind == "fleet":
            self.client.close()
        if self.trainer is not None:
            self.trainer.shutdown()
            self.trainer = None
