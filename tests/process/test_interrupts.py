"""An interrupt (Ctrl-C) at every place of a call where the interpreter looks for one: what it ended is as if it had not
begun, or is whole, and nobody has to wait for what it left."""

from __future__ import annotations

import gc
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import weights_servers
from conftest import Child, until
from leftovers import left
from strikes import UNCLEAN, every, strikes, struck_as_it_waits
from weights import Net, copy_of, root

import transfer_queue as tq
from transfer_queue.background_call import BackgroundCall
from transfer_queue.client.local_locks import LocalLocks, ThreadWaiter, local
from transfer_queue.errors import Aborted, InvalidInput
from transfer_queue.weights import ModuleSource
from transfer_queue.weights.http import WeightSyncClient
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.deadline import held

LARGE = {"x": torch.zeros(4, 100_000), "y": torch.zeros(4)}
pytestmark = UNCLEAN


@pytest.fixture
def client(service: Callable[..., tq.TransferQueueClient]) -> tq.TransferQueueClient:
    """One that does not look for answers before it sleeps: its calls have the same places each time."""
    return service(client={"spin_us": 0})


@pytest.mark.parametrize("way", ["get_meta", "take", "lease"])
def test_rows_that_nobody_got_are_offered_again(client: tq.TransferQueueClient, way: str) -> None:
    client.put({"x": torch.zeros(2, 8)}, partition_id="p")

    def fetch() -> Any:
        if way == "take":
            return client.take("p", ["x"], 2, "t")
        return client.get_meta(["x"], 2, "p", task_name="t", lease_s=600 if way == "lease" else None)

    def is_clean() -> bool:
        return left(client) == 2 and not client.overview().leases and not client.stats()["pinned_nbytes"]

    assert len(list(every(fetch, is_clean))) > 100


def test_a_second_interrupt_does_not_lose_what_the_first_one_gives_back(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one strikes as the call is about to confirm its rows, the second one before or after it."""
    client.put({"x": torch.zeros(2, 8)}, partition_id="p")

    def interrupted(rid: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client.session, "confirmation", interrupted)
    fetching = every(lambda: client.get_meta(["x"], 2, "p", task_name="t"), lambda: left(client) == 2)
    assert any("settle" in place for place in fetching)
    assert left(client) == 2


@pytest.mark.parametrize("copy", [False, True])
def test_a_read_leaves_nothing_pinned(client: tq.TransferQueueClient, copy: bool) -> None:
    meta = client.put(LARGE, partition_id="p")
    reading = every(lambda: client.get_data(meta, copy=copy), lambda: not client.stats()["pinned_nbytes"])
    assert len(list(reading)) > 100


@pytest.mark.parametrize("way", ["put", "kv_batch_put", "allocate"])
def test_a_write_is_whole_or_nothing(client: tq.TransferQueueClient, way: str) -> None:
    client.put(LARGE, partition_id="other")
    before = client.stats()["arena_nbytes_used"]

    def write() -> Any:
        if way == "put":
            return client.put(LARGE, partition_id="p")
        if way == "kv_batch_put":
            return tq.kv_batch_put(list("abcd"), "p", fields=LARGE)
        return client.allocate({"x": ((2, 50_000), torch.float32)})

    def is_clean() -> bool:
        found = [one for one in client.overview().partitions if one.name == "p"]
        assert all(one.written == [4, 4] for one in found if one.rows), found
        client.clear_partition("p")
        return client.stats()["arena_nbytes_used"] <= before + (1 << 16)

    assert len(list(every(write, is_clean))) > 100


def test_an_acknowledgement_counts_for_all_its_rows_or_for_none(client: tq.TransferQueueClient) -> None:
    client.put({"x": torch.zeros(2, 8)}, partition_id="p")
    lent = [client.get_meta(["x"], 2, "p", task_name="t", lease_s=600)]

    def is_clean() -> bool:
        leases = client.overview().leases
        assert [one.rows for one in leases] in ([], [2])
        if not leases:
            client.reset_consumption("p", "t")
            lent[0] = client.get_meta(["x"], 2, "p", task_name="t", lease_s=600)
        return True

    assert len(list(every(lambda: client.ack(lent[0]), is_clean))) > 30


def test_attempts_that_nobody_got_are_claimed_by_others(client: tq.TransferQueueClient) -> None:
    pool = tq.group_pool("p", tq.GroupPolicy())
    groups = (f"g{number}" for number in itertools.count())
    pool.open(next(groups), 4)

    def is_clean() -> bool:
        attempts = pool.claim(max_slots=4, timeout_s=5)
        pool.finish_batch([attempt.result() for attempt in attempts], {"x": torch.zeros(len(attempts), 3)})
        pool.open(next(groups), 4)
        return len(attempts) == 4

    assert len(list(every(lambda: pool.claim(max_slots=4), is_clean))) > 50


def test_groups_that_nobody_got_are_selected_by_others(client: tq.TransferQueueClient) -> None:
    pool = tq.group_pool("p", tq.GroupPolicy())
    pool.open("g", 1)
    pool.finish(pool.claim()[0], {"x": torch.zeros(1, 3)})

    def is_clean() -> bool:
        batch = pool.select(min_groups=1, timeout_s=5)
        pool.release(batch)
        return len(batch.groups) == 1

    assert len(list(every(lambda: pool.select(min_groups=1), is_clean))) > 50


def test_a_result_is_there_once_when_it_is_sent_again(client: tq.TransferQueueClient) -> None:
    pool = tq.group_pool("p", tq.GroupPolicy())
    attempts: list[Any] = []

    def prepare() -> None:
        pool.open(f"g{len(attempts)}", 1)
        attempts.append(pool.claim(timeout_s=5)[0])

    def finish() -> Any:
        return pool.finish(attempts[-1], {"x": torch.zeros(1, 3)})

    def is_clean() -> bool:
        try:
            finish()
        except InvalidInput as error:  # the struck one was whole
            if "has another result already" not in str(error):
                raise
        assert pool.status()["sealed"] == len(attempts)
        assert [one.written for one in client.overview().partitions if one.name == "p"] == [[len(attempts)]]
        prepare()
        return True

    prepare()
    assert len(list(every(finish, is_clean))) > 50


def test_a_stream_that_ends_leaves_nothing_on_lease(client: tq.TransferQueueClient) -> None:
    """Python's own threads are left out: an interrupt inside `Thread.start` may come out as a RuntimeError."""
    client.put({"x": torch.zeros(8, 3)}, partition_id="p")

    def one_batch() -> Any:
        return next(iter(tq.stream("p", ["x"], task="t", batch_size=4)))

    def is_clean() -> bool:
        gc.collect()
        return left(client) == 8 and not client.overview().leases

    one_batch()
    until(is_clean, "the end of the first stream")
    assert len(list(every(one_batch, is_clean, threading.__file__, step=11))) > 10  # every one of them takes a minute


def test_a_lock_of_the_service_is_held_by_nobody(client: tq.TransferQueueClient) -> None:
    def locked() -> None:
        with tq.kv_global_lock("k", "p", timeout=5, lease_s=600):
            pass

    assert len(list(every(locked, lambda: not any(tq.kv_lock_list("p").values())))) > 100


def test_a_lock_of_this_process_is_held_by_nobody() -> None:
    def locked() -> None:
        with tq.kv_local_lock(["a", "b"], "p", timeout=5):
            pass

    assert len(list(every(locked, lambda: not len(local)))) > 30


def test_who_waits_for_a_lock_of_this_process_gets_it() -> None:
    """Its holder's leaving is struck, while two more wait in order."""
    names = [("p", "a"), ("p", "b")]
    locks, waiters = LocalLocks(), [ThreadWaiter() for _ in range(3)]

    def prepare() -> None:
        for waiter, wanted in zip(waiters, (names, names, names[:1]), strict=True):
            waiter.__init__()  # type: ignore[misc]
            locks._add(waiter, wanted)

    def leave() -> None:
        try:
            locks.leave(waiters[0])
        except BaseException:
            locks.leave_at_last(waiters[0])
            raise

    prepare()
    num_places = 0
    for _ in strikes(leave, __file__):
        num_places += 1
        for waiter in waiters[1:]:
            assert not waiter._turn.locked()
            locks._claims.check_invariants()
            locks.leave(waiter)
        assert not len(locks)
        prepare()
    assert num_places > 10


def test_a_lock_that_is_waited_for_with_a_time_out_is_held_by_nobody() -> None:
    lock = threading.RLock()

    def locked() -> None:
        with held(lock, 5) as is_held:
            assert is_held

    assert len(list(every(locked, lambda: not lock._is_owned()))) > 5


@pytest.mark.parametrize(("engine", "anchor_every"), [("tcp", 1), ("shm", 1), ("tcp", 10)])
def test_the_next_update_of_weights_is_taken(engine: str, anchor_every: int, child: Callable[[str], Child]) -> None:
    """After each interrupt of `send_weights`, in a few seconds every 31st of its places."""
    path = f"import sys; sys.path.insert(0, {str(Path(weights_servers.__file__).parent)!r})"
    server = child(f"{path}; import weights_servers as them; them.ENGINE = {engine!r}; them.run_server()")
    server.say("0")
    module = Net()
    trainer = registry.trainer(engine).trainer_init(
        {"anchor_every": anchor_every}, client=WeightSyncClient(server.line(), weights_servers.TOKEN),
        source=ModuleSource(module),
    )  # fmt: skip
    num_places = 0

    def update() -> Any:
        with torch.no_grad():
            module.first.weight[0, 0] += 1
        return trainer.send_weights(deadline_s=20)

    try:
        trainer.send_weights(deadline_s=20)
        for _ in strikes(update, only="/transfer_queue/", step=31):
            with torch.no_grad():
                module.first.weight[1, 1] += 1
            trainer.send_weights(deadline_s=5)
            server.say()
            assert json.loads(server.line())["root"] == root(copy_of(module))
            num_places += 1
    finally:
        trainer.shutdown()
    server.finish()
    assert num_places > 10


def test_a_call_in_a_thread_that_never_began_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    known: list[Any] = []
    with monkeypatch.context() as starting:
        starting.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            BackgroundCall("tq-test", int, known=known)
    assert known[0].ended(5)
    with pytest.raises(Aborted, match="before it began"):
        known[0].outcome()


def test_a_wait_that_was_struck_is_not_the_end_of_the_call() -> None:
    """Up to Python 3.12 a thread seems to have ended once an interrupt struck its `join`."""
    gate = threading.Event()
    call = BackgroundCall("tq-test", gate.wait)
    struck_as_it_waits(lambda: call.ended(60), "tq-test")
    assert not call.ended(0.0)
    gate.set()
    assert call.ended(60)
    assert call.outcome()


def test_a_wait_may_be_struck_anywhere() -> None:
    known: list[Any] = []

    def wait() -> bool:
        return BackgroundCall("tq-test", sum, range(10**6), known=known).ended(60)

    for strike in strikes(wait, threading.__file__, only="background_call"):
        assert all(call.ended(5) for call in known), strike
        known.clear()


def test_a_call_in_a_thread_is_known_wherever_its_start_was_struck() -> None:
    known: list[Any] = []
    done: list[int] = []
    for strike in strikes(lambda: BackgroundCall("tq-test", done.append, 1, known=known), threading.__file__):
        assert all(call.ended(5) for call in known)
        num_done = len(done)
        known.clear()
        if strike.result is not None:
            assert num_done
    assert done
