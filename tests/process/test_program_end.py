"""A program that ends waits for calls that are to outlast it, and for those that these begin."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Child

OUTLASTING = """
import threading
from concurrent.futures import ThreadPoolExecutor
from transfer_queue.background_call import BackgroundCall

ending = threading.Event()

def outlasting(function):
    BackgroundCall("tq-test", function).outlast(30)

def last():
    ending.wait()
    print("last", flush=True)

def begin():
    threading._register_atexit(ending.set)
"""

pytestmark = pytest.mark.skipif(
    sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)), reason="starts no threads once the main one has ended"
)


def test_a_call_that_was_begun_by_one_that_is_waited_for_is_waited_for(fresh_child: Callable[[str], Child]) -> None:
    program = fresh_child(f"""{OUTLASTING}
def first():
    ending.wait()
    outlasting(lambda: print(sum(range(3 * 10**7)), flush=True))

begin()
outlasting(first)
""")
    assert program.finish() == str(sum(range(3 * 10**7)))


def test_a_call_that_is_waited_for_may_use_executors(fresh_child: Callable[[str], Child]) -> None:
    program = fresh_child(f"""{OUTLASTING}
def in_a_pool():
    ending.wait()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(last).result()

begin()
outlasting(in_a_pool)
""")
    assert program.finish() == "last"


def test_a_forked_child_of_multiprocessing_waits_for_its_calls(fresh_child: Callable[[str], Child]) -> None:
    program = fresh_child(f"""{OUTLASTING}
import multiprocessing

def run():
    begin()
    outlasting(last)

child = multiprocessing.get_context("fork").Process(target=run)
child.start()
child.join()
print("child ended with", child.exitcode, flush=True)
""")
    assert program.finish() == "last\nchild ended with 0"


def test_a_forked_child_does_not_wait_for_its_parents_calls(fresh_child: Callable[[str], Child]) -> None:
    program = fresh_child(f"""{OUTLASTING}
import os

outlasting(last)
pid = os.fork()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
    print("child ended", flush=True)
    begin()
""")
    assert program.finish() == "child ended\nlast"


def test_a_call_that_ends_too_late_is_not_waited_for(fresh_child: Callable[[str], Child]) -> None:
    program = fresh_child(f"""{OUTLASTING}
BackgroundCall("tq-test", threading.Event().wait).outlast(30, patience_s=29)
print("the end", flush=True)
""")
    assert program.finish(20) == "the end"


def test_a_rendezvous_that_nobody_came_to_does_not_end_the_program(fresh_child: Callable[[str], Child]) -> None:
    program = fresh_child("""
import torch
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.weights import StateDictSource
from transfer_queue.weights.transport import registry

class Client:
    def init_weight_transfer_engine(self, info): ...

info = {"world_size": 2, "timeout_s": 0.2}
try:
    registry.trainer("collective").trainer_init(info, client=Client(), source=StateDictSource({"a": torch.ones(3)}))
except DeadlineExceeded:
    print("nobody came", flush=True)
""")
    assert program.finish() == "nobody came"


# The program waits for a thread that is no daemon, which is how a training loop may run.
GOES_ON = """
import threading
import torch

def afterwards(function):
    def run():
        threading.main_thread().join()
        function()

    threading.Thread(target=run).start()
"""


def test_a_thread_that_goes_on_puts_and_gets_rows_of_any_size(fresh_child: Callable[[str], Child]) -> None:
    program = fresh_child(f"""{GOES_ON}
import transfer_queue as tq

def work():
    keys = [str(row) for row in range(32)]
    tq.kv_batch_put(keys, "train", fields={{"x": torch.ones(32, 1 << 18)}})
    print(int(tq.kv_batch_get(keys, "train")["x"].sum()), flush=True)
    tq.close()

tq.init()
tq.get_client()
afterwards(work)
""")
    assert program.finish() == str(32 << 18)


@pytest.mark.parametrize("engine", ["tcp", "shm"])
def test_a_trainer_in_a_thread_that_goes_on_sends_a_model_of_any_size(
    fresh_child: Callable[[str], Child], engine: str
) -> None:
    """To two servers, first all and then what changed: whatever copies or asks in several threads at once."""
    program = fresh_child(f"""{GOES_ON}
from transfer_queue.weights import Control, InPlace, ModuleSource, Receiver
from transfer_queue.weights.http import WeightSyncClient, serve
from transfer_queue.weights.transport import registry

def net():
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))

def work():
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.add_(1)
        print(trainer.send_weights(deadline_s=30).kind, flush=True)
    print(all(torch.equal(one[0].weight, model[0].weight) for one in models), flush=True)
    trainer.shutdown()

model, models = net(), [net(), net()]
receivers = [Receiver(InPlace(one)) for one in models]
servers = [serve(Control(registry.engine("{engine}")(one), one), token="") for one in receivers]
client = WeightSyncClient([one.url for one in servers], "")
trainer = registry.trainer("{engine}").trainer_init({{"anchor_every": 2}}, client=client, source=ModuleSource(model))
afterwards(work)
""")
    assert program.finish() == "full\ndelta\nTrue"


def test_an_archive_is_read_in_a_thread_that_goes_on(fresh_child: Callable[[str], Child], tmp_path: Path) -> None:
    program = fresh_child(f"""{GOES_ON}
from transfer_queue.weights import Control, ModuleSource
from transfer_queue.weights.archive import Archive, ArchiveReceiver, ArchiveSource
from transfer_queue.weights.transport import registry

def work():
    trainer.send_weights(deadline_s=30)
    receiver.flush(30)
    source = ArchiveSource(Archive({str(tmp_path)!r}))
    print(source.advance(timeout_s=30), source.version, flush=True)
    trainer.shutdown()

receiver = ArchiveReceiver(Archive({str(tmp_path)!r}))
control = Control(registry.engine("tcp")(receiver), receiver)
trainer = registry.trainer("tcp").trainer_init({{}}, client=control, source=ModuleSource(torch.nn.Linear(4, 4)))
afterwards(work)
""")
    assert program.finish() == "True 1"
