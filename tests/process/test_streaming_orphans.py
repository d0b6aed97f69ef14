"""DataLoader workers whose trainer was killed, or whose service is gone: none of them stays."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch.multiprocessing
from conftest import until

import transfer_queue as tq
from transfer_queue.dataloader.feed import Key, Terms
from transfer_queue.dataloader.lease_owner import LeaseOwner
from transfer_queue.dataloader.worker_feed import LoaderPlan, Turn, WorkerFeed
from transfer_queue.errors import ServiceUnavailable

Spawn = Callable[[str], Any]

TRAINER = """
import json, multiprocessing, threading
import transfer_queue as tq
from transfer_queue.dataloader.worker_feed import Links
tq.init()
begin = Links.begin

def tell_and_begin(*args):
    print(json.dumps([worker.pid for worker in multiprocessing.active_children()]), flush=True)
    if {stage!r} == "plan":
        threading.Event().wait()
    begin(*args)

Links.begin = tell_and_begin
dataset = tq.StreamingDataset(
    config=None, batch_size=4, micro_batch_size=2, data_fields=["x"], partition_id="p", task_name="t", dp_rank=0
)
next(iter(tq.StreamingDataLoader(dataset, num_workers=3, multiprocessing_context={context!r})))
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("context", "stage", "closed"),
    [
        ("fork", "plan", False), ("fork", "plan", True), ("fork", "rows", False), ("fork", "rows", True),
        ("spawn", "rows", False), ("forkserver", "rows", True),
    ],
)  # fmt: skip
def test_workers_end_with_a_killed_trainer(
    client: tq.TransferQueueClient, child: Spawn, context: str, stage: str, closed: bool
) -> None:
    """In the stage `rows` one worker waits for rows, the others for their turn; in `plan` all for what to do."""
    trainer = child(TRAINER.format(context=context, stage=stage))
    workers: list[int] = json.loads(trainer.line())
    assert len(workers) == 3
    try:
        if stage == "rows":
            until(lambda: client.stats()["waiting_requests"] == 1, "a worker that waits for rows")
        trainer.kill()
        if closed:
            tq.close()
        until(lambda: not any(map(is_running, workers)), "the end of the workers", 30)
    finally:
        for pid in filter(is_running, workers):
            os.kill(pid, signal.SIGKILL)


def linger(ready: Any, go: Any) -> None:
    """A worker that looks after its parent only when it is told to."""
    from transfer_queue.dataloader.parent import end_with_parent

    ready.send(os.getpid())
    go.acquire()
    end_with_parent()
    threading.Event().wait()


def test_a_worker_whose_parent_died_first_ends_as_soon_as_it_looks() -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    go = context.Semaphore(0)

    def trainer() -> None:
        context.Process(target=linger, args=(sender, go)).start()
        os._exit(0)

    parent = context.Process(target=trainer)
    parent.start()
    pid: int = receiver.recv()
    parent.join()
    assert is_running(pid)
    go.release()
    until(lambda: not is_running(pid), "the end of the worker", 10)
    for end in (receiver, sender):
        end.close()


def test_workers_that_wait_for_their_turn_learn_that_the_service_is_gone(
    service: Callable[..., tq.TransferQueueClient],
) -> None:
    client = service(server={"durability": "none"})
    turn = Turn(torch.multiprocessing.get_context("fork"), 2)
    holder = LeaseOwner(client)
    plan = LoaderPlan(turn.begin(0), "p", 0, frozenset(), holder.ident)
    terms = Terms(
        data_fields=["x"], batch_size=4, task_name="t", sampling_config={}, lease_s=60.0, until_done=True,
        holder=holder.ident,
    )  # fmt: skip
    raised: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            WorkerFeed(client, terms, plan, turn).get(Key("p", worker))
        except ServiceUnavailable as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: client.stats()["waiting_requests"] == 1, "a worker that waits for rows")
    os.kill(client.stats()["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(15)
    waiting = [thread for thread in threads if thread.is_alive()]
    turn.begin(0)  # lets go of those that would wait on
    for thread in waiting:
        thread.join()
    assert not waiting
    assert len(raised) == 2
    holder.close()
