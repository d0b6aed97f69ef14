"""Versions of weights from a trainer's process to servers', by our engines."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from xxhash import xxh3_64

from bench.session import Session
from transfer_queue.errors import TransferQueueError
from transfer_queue.memory.tensors import byte_view
from transfer_queue.weights import CommitInfo, Control, InPlace, ModuleSource, Receiver, Swap, WeightSource
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.http import WeightSyncClient, serve
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.shm import Memory, starts_of
from transfer_queue.weights.version.packing import BUCKET_NBYTES, pack_into, plan

ROWS, COLUMNS = 4096, 1024
TENSOR_NBYTES = 2 * ROWS * COLUMNS
TARGETS = {"swap": Swap, "in place": InPlace}
TOKEN = "the-benchmark"
DEADLINE_S = 300.0
STEP_S = 0.5


def build(session: Session, nbytes: int, seed: int) -> dict[str, Any]:
    """The model, of bfloat16 matrices of 8 MiB each; how many bytes it has."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16) for _ in range(nbytes // TENSOR_NBYTES)]
    session.scratch["model"] = torch.nn.ModuleList(layers)
    return {"nbytes": len(layers) * TENSOR_NBYTES}


def root(session: Session) -> dict[str, Any]:
    """A digest of all weights."""
    state = xxh3_64()
    for tensor in session.scratch["model"].parameters():
        state.update(byte_view(tensor).numpy())
    return {"root": state.hexdigest()}


def change(session: Session, every: int) -> dict[str, Any]:
    """Other values for every n-th element, and time for servers to end what they do after an update: a step of training
    takes longer."""
    for tensor in session.scratch["model"].parameters():
        tensor.detach().view(-1)[::every] += 0.5
    time.sleep(STEP_S)
    return {}


class Watched(Receiver):
    """Says how long its last commit held off requests."""

    pause_s = 0.0

    def commit(self, timeout_s: float | None = None) -> CommitInfo:
        found = super().commit(timeout_s)
        self.pause_s = found.pause_s
        return found


class Requests:
    """Passes through the model at intervals, as requests make them; how long each had to wait for its turn."""

    def __init__(self, receiver: Receiver, every_s: float) -> None:
        self._receiver = receiver
        self._every_s = every_s
        self._longest_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            before = time.monotonic()
            with self._receiver.reading():
                self._longest_s = max(self._longest_s, time.monotonic() - before)

    def longest(self) -> float:
        """Since this was asked last."""
        found, self._longest_s = self._longest_s, 0.0
        return found

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def receive(session: Session, engine: str, target: str, every_s: float = 0.001) -> dict[str, Any]:
    """Serve the model under control over HTTP."""
    receiver = Watched(TARGETS[target](session.scratch["model"]))
    made = registry.engine(engine)(receiver)
    server = serve(Control(made, receiver), token=TOKEN)
    session.scratch.update(engine=made, server=server, requests=Requests(receiver, every_s))
    return {"url": server.url}


def seen(session: Session) -> dict[str, Any]:
    """The pause of the last commit, and the longest wait of a request since this was asked last."""
    return {"pause": session.scratch["engine"].receiver.pause_s, "wait": session.scratch["requests"].longest()}


def join(session: Session, info: dict[str, Any], peers: list[str]) -> dict[str, Any]:
    """Install the newest version, from the trainer or from peers."""
    engine = session.scratch["engine"]
    before = time.monotonic()
    engine.init_transfer_engine(info)
    if peers:
        engine.join_peers(peers, timeout_s=DEADLINE_S)
    else:
        engine.join(timeout_s=DEADLINE_S)
    return {"s": time.monotonic() - before}


def lend(session: Session, token: str) -> dict[str, Any]:
    """Give what is installed to others."""
    return {"address": session.scratch["engine"].serve_installed(token=token)}


def stop_receiving(session: Session) -> dict[str, Any]:
    session.scratch.pop("requests").end()
    session.scratch.pop("server").close()
    session.scratch.pop("engine").shutdown()
    return {}


def train(session: Session, engine: str, urls: list[str], info: dict[str, Any]) -> dict[str, Any]:
    """Have a trainer for the model, and these servers as its fleet; what late replicas need to know."""
    fleet = Fleet({url: WeightSyncClient(url, TOKEN) for url in urls})
    source = ModuleSource(session.scratch["model"])
    trainer = registry.trainer(engine).trainer_init(info, client=fleet, source=source)
    session.scratch.update(fleet=fleet, trainer=trainer)
    return {"init_info": trainer.receivers_info()}


def send(session: Session, full: bool = False) -> dict[str, Any]:
    """One version to all."""
    before = time.monotonic()
    report = session.scratch["trainer"].send_weights(deadline_s=DEADLINE_S, full=full)
    total = time.monotonic() - before
    assert not session.scratch["fleet"].last.missed
    steps = {"pack": report.pack_s, "update": report.update_s, "commit": report.commit_s}
    return {"total": total, "nbytes": report.nbytes, "full": float(report.kind == "full"), **steps}


def pack(session: Session) -> dict[str, Any]:
    """Packing and nothing else, into shared memory that was written before: what `publish` cannot do without."""
    trainer, source = session.scratch["trainer"], ModuleSource(session.scratch["model"])
    where = plan(source.specs(), trainer.info.bucket_nbytes or BUCKET_NBYTES)
    starts = starts_of(where.buckets)
    if "packed" not in session.scratch:
        session.scratch["packed"] = Memory(starts[-1])
    memory = session.scratch["packed"].data
    places = [memory[at : at + size] for at, size in zip(starts, where.buckets, strict=False)]
    before = time.monotonic()
    pack_into(source, where, places)
    return {"s": time.monotonic() - before}


def publish(session: Session, count: int = 1) -> dict[str, Any]:
    """Until the last of `count` calls, one right after the other, returned, from when it was made; until all ended."""
    trainer, begun = session.scratch["trainer"], time.monotonic()
    tickets = []
    for _ in range(count):
        before = time.monotonic()
        tickets.append(trainer.publish(deadline_s=DEADLINE_S))
    returned = time.monotonic()
    reports = [ticket.result() for ticket in tickets]
    full = float(any(report.kind == "full" for report in reports))
    return {"returned": returned - before, "total": time.monotonic() - begun, "full": full}


class Misfit:
    """The source of a version that no receiver can take: a tensor has another shape."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def specs(self) -> Any:
        first, *others = self._source.specs()
        return [first._replace(shape=(first.shape[0] * 2, first.shape[1] // 2)), *others]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._source.tensors()
        name, tensor = next(iter(tensors))
        yield name, tensor.reshape(tensor.shape[0] * 2, -1)
        yield from tensors

    def aliases(self) -> dict[str, str]:
        return self._source.aliases()


def fail_and_recover(session: Session) -> dict[str, Any]:
    """Seconds from the answer to an update that cannot be taken until all are ready and one takes the next update."""
    trainer, fleet = session.scratch["trainer"], session.scratch["fleet"]
    good, trainer._source = trainer._source, Misfit(trainer._source)
    try:
        trainer.send_weights(deadline_s=DEADLINE_S)
    except TransferQueueError as error:
        failed, said = time.monotonic(), error.code
    else:
        raise AssertionError("a misfit was taken")
    finally:
        trainer._source = good
    assert fleet.ready() == [one.name for one in fleet.status()]
    fleet.start_weight_update()
    recovered = time.monotonic()
    fleet.update_weights({"abort": True})
    return {"s": recovered - failed, "said": said}


def stop_training(session: Session) -> dict[str, Any]:
    with contextlib.suppress(KeyError):
        session.scratch.pop("fleet").close()
        session.scratch.pop("trainer").shutdown()
        session.scratch.pop("packed").close()
    return {}
