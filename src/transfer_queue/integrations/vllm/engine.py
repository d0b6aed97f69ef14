"""What the workers of vLLM call: the methods of its `WeightTransferEngine` (0.26 and newer), and no other tie to it.

A call that raises in a worker leaves the answers of the other workers in their queues, and every later call gets the
answer of an earlier one. So nothing raises here: faults are recorded and reported to the trainer, and `finish` commits
or does nothing. A call keeps the worker from generating, so all but the commit goes on in a thread beside it.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from transfer_queue.errors import CommitFailed, DeadlineExceeded
from transfer_queue.integrations.vllm.adapters import LabeledAdapters
from transfer_queue.integrations.vllm.model import LoadedModel
from transfer_queue.integrations.vllm.ranks import Ranks
from transfer_queue.weights.receive.receiver import Receiver, VersionInfo
from transfer_queue.weights.receive.update_session import begun_of, run_of, timeout_of
from transfer_queue.weights.transport.registry import engine

log = logging.getLogger("transfer_queue.weights")
FINISH_S = 300.0  # how long `finish` waits for an update that gives no time of its own
LEAVE_S = 2.0
WORKERS = ("vllm.v1.worker.gpu_worker",)  # those for other devices are its subclasses
Method = TypeVar("Method", bound=Callable[..., Any])


def _attempt(what: str, call: Callable[[], object]) -> None:
    """What raises puts the workers out of step: it is only logged."""
    try:
        call()
    except Exception:
        log.exception("%s failed", what)


def _silent(method: Method) -> Method:
    """Nothing leaves it."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **more: Any) -> None:
        _attempt(method.__name__, lambda: method(self, *args, **more))

    return call  # type: ignore[return-value]


class Lane:
    """Calls in a thread beside the worker's, one after the other. It is there from the first `add` to `close`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], object]] = deque()
        self._num_left = 0
        self._thread: threading.Thread | None = None
        self._closing = False

    def add(self, function: Callable[..., object], *args: Any) -> None:
        with self._changed:
            self._num_left += 1
            self._calls.append(functools.partial(function, *args))
            self._closing = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tq-weights-lane", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def ended(self, timeout_s: float) -> bool:
        """Whether all that was added is done, within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_left, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the thread once all is done; it is waited for `timeout_s`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closing)
                if not self._calls:
                    self._thread = None
                    self._changed.notify_all()
                    return
                call = self._calls.popleft()
            _attempt("a call of the weights' lane", call)
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()


class WorkerEngine:
    """One for each worker. `transport` names the engine that brings the bytes."""

    transport: ClassVar[str] = "shm"
    supports_draft_weight_update: ClassVar[bool] = False
    defers_processing: ClassVar[bool] = False
    init_info_cls: ClassVar[type] = dict
    update_info_cls: ClassVar[type] = dict

    def __init__(self, config: Any, vllm_config: Any, device: Any = None, model: Any = None, **more: Any) -> None:
        del more  # of later releases
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config
        self._ranks = Ranks()
        self.target = LoadedModel(model, vllm_config, self._ranks.all)
        self._adapters = LabeledAdapters(model, self.target)
        self._receiver = Receiver(self.target, adapter=self._adapters)
        self._engine = engine(self.transport)(self._receiver, rank=_rank(self.parallel_config), on_fault="record")
        self._engine.confine()  # a worker cannot tell who calls: vLLM's routes, or the process that made it
        self._lane = Lane()
        self._patience_s = FINISH_S
        self._is_sent = False  # a version, and nothing has ended its update; by the calls, which all workers get alike
        end_sessions_with_init()

    def installed(self) -> VersionInfo:
        return self._receiver.installed()

    # vLLM's calls

    def parse_init_info(self, init_dict: Any) -> Any:
        """As it came: what is wrong with it is reported."""
        return init_dict

    def parse_update_info(self, update_dict: Any) -> Any:
        return update_dict

    @_silent
    def init_transfer_engine(self, init_info: Any) -> None:
        self._receiver.introduce(run_of(init_info), begun=begun_of(init_info))
        self._give_up("another trainer came")
        self._lane.add(self._engine.init_transfer_engine, init_info)

    @_silent
    def start_weight_update(self) -> None:
        self._patience_s, self._is_sent = FINISH_S, False
        self._receiver.end("another update started")
        self._receiver.begin()
        self._lane.add(self._engine.start_weight_update)

    @_silent
    def update_weights(self, update_info: Any) -> None:
        """Begins; the trainer hears when the version is verified."""
        self._receiver.expect_run(run_of(update_info))
        if isinstance(update_info, Mapping) and update_info.get("abort"):
            self._give_up("the trainer gave it up")
            return
        self._patience_s, self._is_sent = timeout_of(update_info, FINISH_S), True
        self._lane.add(self._engine.update_weights, update_info)

    def receive_weights(self, update_info: Any) -> None:
        self.update_weights(update_info)

    @_silent
    def finish_weight_update(self) -> None:
        """Commit, if every worker of this server can; otherwise none does. All of them had the same calls: where one of
        these ended the update, nobody has anything to do, and nobody asks the others. A fault that a worker met by
        itself is no such end: the others ask it."""
        if not self._is_sent:
            return
        self._is_sent = False
        done = self._lane.ended(self._patience_s)
        if not self._ranks.same(_number(self._engine.ready) if done else 0):
            self._give_up("not every worker of this server can take it")
            self._lane.add(self._engine.refuse, CommitFailed("not every worker of this server can take it"))
            return
        if not done or not self._engine.ready:
            late = DeadlineExceeded("the update did not arrive in time")
            self._lane.add(self._engine.refuse, late) if not done else self._engine.finish_weight_update()
            return
        self.target.voted = False
        start = time.monotonic()
        self._engine.finish_weight_update()
        if not self.target.voted:  # the others wait for what this one says
            self._ranks.all(self._engine.outcome.installed)
        self._adapters.unload()
        log.info("%s after %.3f s", self.installed(), time.monotonic() - start)

    @_silent
    def shutdown(self) -> None:
        self._is_sent = False
        self._receiver.end("shut down")
        self._lane.add(self._engine.shutdown)
        self._lane.close(LEAVE_S)

    def drain_pending(self) -> None:
        """Nothing is pending after `finish`."""

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        """Only for draft models, which are not supported."""

    def reset_weight_update_target(self) -> None:
        """See above."""

    def _give_up(self, why: str) -> None:
        """Drop the open update, also one that is being received."""
        self._is_sent = False
        self._receiver.end(why)
        self._lane.add(self._engine.update_weights, {"abort": True})


def end_sessions_with_init() -> None:
    """vLLM's worker keeps for itself that an update is open, refuses the next one then, and has no call that ends it: a
    trainer that died in an update would lock out all others. So its `init` ends the session, as our receivers' does."""
    for module in WORKERS:
        worker: Any = getattr(sys.modules.get(module), "Worker", None)
        init: Any = getattr(worker, "init_weight_transfer_engine", None)
        if init is None or getattr(init, "ends_session", False):
            if worker is not None and init is None:
                log.warning("this vLLM's worker has no init_weight_transfer_engine: an update left open stays open")
            continue

        def wrapped(self: Any, *args: Any, init: Any = init, **more: Any) -> Any:
            if isinstance(getattr(self, "weight_transfer_engine", None), WorkerEngine):
                self._weight_update_active = False
            return init(self, *args, **more)

        wrapped.ends_session = True  # type: ignore[attr-defined]
        worker.init_weight_transfer_engine = functools.wraps(init)(wrapped)


class ShmWorker(WorkerEngine):
    transport = "shm"


class TcpWorker(WorkerEngine):
    transport = "tcp"


class DiskWorker(WorkerEngine):
    transport = "disk"


class CollectiveWorker(WorkerEngine):
    transport = "collective"


class CudaIpcWorker(WorkerEngine):
    """The trainer writes a buffer again once the call that named it was answered, so calls wait here until the bucket
    is copied: the worker does not generate meanwhile."""

    transport = "cuda_ipc"

    @_silent
    def update_weights(self, update_info: Any) -> None:
        super().update_weights(update_info)
        self._lane.ended(timeout_of(update_info, FINISH_S))


def _rank(parallel: Any) -> int:
    """Of this worker among all of its server, as vLLM counts."""
    return int(getattr(parallel, "data_parallel_index", 0)) * int(parallel.world_size) + int(parallel.rank)


def _number(key: str) -> int:
    """The manifest's name, short enough for an exchange; 0 for none."""
    return int(key[:15], 16) + 1 if key else 0
