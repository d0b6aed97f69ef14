"""A trainer and receivers in processes of their own; the test is the control plane between them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
from conftest import freeze
from paths import HELPERS
from weights import Net, Weights, copy_of, drawn, lora, merged, root

from transfer_queue.errors import DeadlineExceeded, ServiceUnavailable, error_from_code
from transfer_queue.weights import InPlace, Receiver, StateDictSource, Swap
from transfer_queue.weights.receive.adapters import Lora
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport import trainer as trainer_module

Hook = Callable[[str, str], None]
REMOTE = {
    "init_weight_transfer_engine": "init_transfer_engine",
    "start_weight_update": "start_weight_update",
    "update_weights": "update_weights",
    "finish_weight_update": "finish_weight_update",
}
BUCKET_NBYTES = 128
CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": ["first"], "lora_dropout": 0.05}
GIVEN = torch.arange(8.0)
NAMES = ("shm", "tcp", "disk", "collective", "cuda_ipc")
PRELOADED = ["engines", *(f"transfer_queue.weights.transport.{name}" for name in NAMES)]


@contextlib.contextmanager
def processes() -> Iterator[Any]:
    """The context that starts children quickly: they are forked from a process that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11 preloads silently nothing that only `sys.path` leads to
        patch.setenv("PYTHONPATH", os.pathsep.join((str(HELPERS), str(HELPERS.parent))), prepend=os.pathsep)
        forkserver.ensure_running()
    starter = context.Process(target=exec, args=(f"import sys; assert {__name__!r} in sys.modules",))
    starter.start()  # the imports take seconds, not those of the first test
    starter.join()
    assert starter.exitcode == 0, "children would import everything anew, which takes seconds of each"
    yield context
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


class Process:
    """A child that answers commands."""

    def __init__(self, context: Any, target: Callable[..., None], *args: Any) -> None:
        self.conn, theirs = context.Pipe()
        self.calls, their_calls = context.Pipe()  # what the child asks for
        self.process = context.Process(target=target, args=(theirs, their_calls, *args), daemon=True)
        self.process.start()
        theirs.close()
        their_calls.close()
        self._number = 0

    def send(self, command: str, *args: Any) -> int:
        self._number += 1
        with contextlib.suppress(OSError):
            self.conn.send((self._number, command, args))
        return self._number

    def answer(self, number: int, timeout_s: float = 20.0) -> Any:
        """Raises what the child answers, or `DeadlineExceeded`, or `ServiceUnavailable` when it is dead."""
        end = time.monotonic() + timeout_s
        found, ok, value = 0, False, None
        try:
            while found != number:
                if not self.conn.poll(max(end - time.monotonic(), 0.0)):
                    raise DeadlineExceeded("the process does not answer")
                found, ok, value = self.conn.recv()
        except (EOFError, ConnectionError):
            raise ServiceUnavailable("the process is dead") from None
        if not ok:
            raise error_from_code(*value)
        return value

    def call(self, command: str, *args: Any, timeout_s: float = 20.0) -> Any:
        return self.answer(self.send(command, *args), timeout_s)

    def signal(self, number: signal.Signals) -> None:
        if number == signal.SIGSTOP:
            freeze(self.process.pid)
        else:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """kill -9, and wait for the end. Repeatable."""
        if not self.conn.closed:
            self.process.kill()
            self.process.join()
            self.process.close()
            self.conn.close()
            self.calls.close()


# in the children


def receive(
    conn: Connection, _calls: Connection, name: str, rank: int, target: str, on_fault: str, device: str
) -> None:
    torch.set_num_threads(1)
    module = Net().to(device)
    kind = {"in_place": InPlace, "swap": Swap}[target]
    adapters = Lora(module)
    receiver = Receiver(kind(module), adapter=adapters)
    engine = registry.engine(name)(receiver, rank=rank, on_fault=on_fault)  # type: ignore[arg-type]

    def infer(label: str) -> Any:
        with receiver.reading() as live, adapters.active(label, live.tag) if label else contextlib.nullcontext():
            return module.first(GIVEN.to(device)).tolist()

    extra = {
        "infer": infer,
        "root": lambda: root(copy_of(module)),
        "fds": lambda: len(os.listdir("/proc/self/fd")),
        "installed": lambda: engine.receiver.installed(),
        "is_apart": lambda: engine._sharing._is_apart,  # type: ignore[attr-defined]
        "hide": lambda: engine._sharing._server.close(),  # type: ignore[attr-defined]
        "served": lambda: engine.num_served_nbytes,  # type: ignore[attr-defined]
        "spoil_staged": lambda: [one.add_(1) for one in engine.receiver.session.opened.staging._buckets.values()][:0],  # type: ignore[union-attr]
        "outcome": lambda: engine.outcome,
        "spoil": lambda: module.first.weight.data.add_(1).sum().item(),
        "join": lambda **more: engine.join(**more).version,
        "join_peers": lambda peers, timeout_s: engine.join_peers(peers, timeout_s=timeout_s).version,  # type: ignore[attr-defined]
    }
    _serve(conn, lambda command: extra.get(command) or getattr(engine, command))


class Changing:
    """The source of a trainer whose weights the test chooses. `stop` is called in the middle of reading."""

    def __init__(self) -> None:
        self.weights: Weights = {}
        self.stop: Callable[[], object] = lambda: None

    def specs(self) -> Any:
        return StateDictSource(self.weights).specs()

    def tensors(self) -> Any:
        for name, tensor in StateDictSource(self.weights).tensors():
            yield name, tensor
            self.stop()

    def aliases(self) -> dict[str, str]:
        return {}


class PipeClient:
    """Asks the test to make the call."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._turn = threading.Lock()

    def ask(self, name: str, *args: Any) -> None:
        with self._turn:
            self._conn.send((name, args))
            fault = self._conn.recv()
        if fault:
            raise error_from_code(*fault)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.ask(
            name, *(args if name in ("init_weight_transfer_engine", "update_weights") else ())
        )


def train(conn: Connection, calls: Connection, name: str, info: dict[str, Any], device: str) -> None:
    torch.set_num_threads(1)
    source, client = Changing(), PipeClient(calls)
    trainer_module.ABORT_S = 0.3
    seal = trainer_module.PendingVersion.seal
    made: list[trainer_module.TrainerEngine] = []

    def start() -> dict[str, Any]:
        made.append(registry.trainer(name).trainer_init(info, client=client, source=source))
        return made[0].receivers_info()

    def send(seed: int, deadline_s: float, fault: str = "", version: int | None = None) -> Any:
        source.weights = {name: tensor.to(device) for name, tensor in drawn(Net(), seed).items()}
        if fault == "unknown":
            source.weights["unheard_of"] = torch.ones(3)
        source.stop = (lambda: client.ask("packing")) if fault == "packing" else (lambda: None)
        trainer_module.PendingVersion.seal = _lying(seal) if fault == "corrupt" else seal  # type: ignore[method-assign]
        return made[0].send_weights(version, deadline_s=deadline_s)

    def send_adapter(label: str, seed: int, deadline_s: float, fault: str = "", for_base: bool = True) -> Any:
        chosen = Changing()
        chosen.weights = lora(seed)
        chosen.stop = (lambda: client.ask("packing")) if fault == "packing" else (lambda: None)
        trainer_module.PendingVersion.seal = _lying(seal) if fault == "corrupt" else seal  # type: ignore[method-assign]
        return made[0].send_adapter(label, chosen, CONFIG, for_base=for_base, deadline_s=deadline_s)

    def remove_adapter(label: str) -> Any:
        return made[0].remove_adapter(label, deadline_s=20.0)

    def lent() -> int:
        ring = made[0].store  # type: ignore[attr-defined]
        return sum(one.num_borrowers for one in [*ring._idle, *ring.contents()])

    commands = {
        "start": start, "send": send, "send_adapter": send_adapter, "remove_adapter": remove_adapter, "lent": lent,
        "shutdown": lambda: made[0].shutdown(),
    }  # fmt: skip
    _serve(conn, commands.__getitem__)


def _lying(seal: Any) -> Any:
    """Makes manifests in which one tensor's bytes are others than those that are sent."""

    def lie(self: Any, where: Any, digests: dict[str, str], *more: Any) -> Any:
        return seal(self, where, {**digests, next(iter(digests)) if self.adapter else "first.bias": "0" * 32}, *more)

    return lie


def _serve(conn: Connection, find: Callable[[str], Callable[..., Any]]) -> None:
    while True:
        try:
            number, command, args = conn.recv()
        except EOFError:
            return
        more = args[-1] if args and isinstance(args[-1], dict) and command == "join" else None
        try:
            value = find(command)(*args) if more is None else find(command)(**more)
            conn.send((number, True, value))
        except Exception as error:  # noqa: BLE001 the test judges it
            conn.send((number, False, (getattr(error, "code", "internal"), f"{type(error).__name__}: {error}")))


# in the test


class Site:
    """One trainer and its receivers."""

    def __init__(
        self, context: Any, engine: str, folder: Any, num: int = 2, on_fault: str = "raise", on: str = "", **info: Any
    ) -> None:
        """`on`: the device of all weights, if it is not the engine's."""
        self._context = context
        self._device = on or info.get("device", "cpu")
        self.name, _, algo = engine.partition("-")
        self.info = {"bucket_nbytes": BUCKET_NBYTES, **info}
        if self.name == "shm":
            self.info.setdefault("recheck", True)  # the faults here are manifests that lie
        if self.name == "disk":
            self.info.update(folder=str(folder), sync=False)
        if self.name == "collective":
            self.info.update(world_size=num + 1)
        if self.name == "cuda_ipc":
            self.info = {"device": "cpu", "num_receivers": num, "algo": algo or "mix64x2", **self.info}
        self.on_fault = on_fault
        self.patience_s = 20.0
        self.receivers = [self.receiver(rank) for rank in range(num)]
        self.updates: list[dict[str, Any]] = []
        self.trainer: Process | None = None

    def receiver(self, rank: int) -> Process:
        target = "swap" if rank % 2 else "in_place"
        return Process(self._context, receive, self.name, rank, target, self.on_fault, self._device)

    def start_trainer(self) -> dict[str, Any]:
        self.end_trainer()
        self.trainer = Process(self._context, train, self.name, self.info, self._device)
        self.init_info = self._lead("start")
        return self.init_info

    def end_trainer(self) -> None:
        if self.trainer is not None:
            self.trainer.kill()
            self.trainer = None

    def send(self, seed: int, *, deadline_s: float = 20.0, fault: str = "", hook: Hook | None = None) -> Any:
        """The trainer's report. `hook(call, when)` is called "before" each call, and while it is "underway"."""
        return self._lead("send", seed, deadline_s, fault, hook=hook)

    def send_adapter(
        self, label: str, seed: int, *, fault: str = "", for_base: bool = True, hook: Hook | None = None
    ) -> Any:
        return self._lead("send_adapter", label, seed, 20.0, fault, for_base, hook=hook)

    def remove_adapter(self, label: str) -> Any:
        return self._lead("remove_adapter", label)

    def answers(self, label: str = "") -> list[Any]:
        """What the receivers' first layers make of `GIVEN`."""
        return [one.call("infer", label) for one in self.receivers]

    def _lead(self, command: str, *args: Any, hook: Hook | None = None) -> Any:
        """Have the trainer do something, and make the calls that it asks for."""
        trainer = self.trainer
        assert trainer is not None
        number = trainer.send(command, *args)
        try:
            while trainer.conn not in (ready := wait([trainer.conn, trainer.calls], self.patience_s)):
                if not ready:
                    raise DeadlineExceeded("the trainer does not answer")
                fault = self._call_all(*trainer.calls.recv(), hook)
                trainer.calls.send(fault)
            found, ok, value = trainer.conn.recv()
            assert found == number
        except (EOFError, OSError):  # also of a pipe that was closed here
            raise ServiceUnavailable("the trainer is dead") from None
        if not ok:
            raise error_from_code(*value)
        return value

    def _call_all(self, name: str, args: Any, hook: Hook | None) -> tuple[str, str] | None:
        if hook:
            hook(name, "before")
        if name not in REMOTE or self.trainer is None:
            return None
        if name == "update_weights":
            self.updates.append(args[0])
        asked = [(one, one.send(REMOTE[name], *args)) for one in self.receivers]
        if hook:
            hook(name, "underway")
        fault = None
        for one, number in asked:
            try:
                one.answer(number, self.patience_s)
            except Exception as error:  # noqa: BLE001 the trainer is told
                fault = fault or (getattr(error, "code", "internal"), str(error))
        return fault

    def roots(self) -> list[str]:
        """What the receivers' weights really are."""
        return [one.call("root") for one in self.receivers]

    def versions(self) -> list[int | None]:
        return [one.call("installed").version for one in self.receivers]

    def close(self) -> None:
        self.end_trainer()
        for one in self.receivers:
            one.kill()


def answer(seed: int, adapter: int | None = None) -> Any:
    """What a receiver's first layer makes of `GIVEN`."""
    weights = drawn(Net(), seed)
    if adapter is not None:
        weights = merged(weights, lora(adapter), 2.0)
    return torch.nn.functional.linear(GIVEN, weights["first.weight"], weights["first.bias"]).tolist()


def expected(seed: int) -> str:
    return root(drawn(Net(), seed))
