"""StreamingDataLoader: the stream of its dataset, also through worker processes, and nothing lost with them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import pytest
import torch
from conftest import until
from streams import dataset, numbers, put, used
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue.dataloader import streaming_dataloader
from transfer_queue.dataloader.worker_feed import LoaderPlan, Turn
from transfer_queue.errors import DeadlineExceeded

Client = tq.TransferQueueClient
Loader = tq.StreamingDataLoader
EIGHT = [[0, 1], [2, 3], [4, 5], [6, 7]]


def doubled(item: Any) -> list[int]:
    return (item[0]["x"] * 2).tolist()


def test_without_workers_it_is_the_dataset(client: Client) -> None:
    put(client, 8)
    put(client, 4, "q", start=100)
    loader = Loader(dataset())
    assert numbers(loader) == EIGHT
    assert [len(meta) for _, meta in loader.get_buffer()] == [4, 4]
    loader.reset()
    assert numbers(loader) == EIGHT
    loader.step("q")
    assert loader.get_buffer() == []
    assert numbers(loader) == [[100, 101], [102, 103]]
    assert list(Loader(dataset("p", task_name="u"), collate_fn=doubled)) == [[0, 2], [4, 6], [8, 10], [12, 14]]


@pytest.mark.parametrize("sampler", ["SequentialSampler", "GRPOGroupNSampler"])
def test_T14_workers_share_the_rows_in_order(service: Callable[..., Client], sampler: str) -> None:
    client = service(controller={"sampler": sampler})
    put(client, 20)
    loader = Loader(dataset(), num_workers=2, multiprocessing_context="fork")
    assert numbers(loader) == [[n, n + 1] for n in range(0, 20, 2)]
    assert used(client) == 20
    assert loader.get_buffer() == []


@pytest.fixture
def tracker() -> Iterator[None]:
    """Ends the process that multiprocessing starts with the first spawned child."""
    yield
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("tracker")
def test_spawned_workers(client: Client) -> None:
    put(client, 8)
    loader = Loader(dataset(), num_workers=2, multiprocessing_context="spawn", prefetch_factor=1)
    assert numbers(loader) == EIGHT
    assert used(client) == 8


def test_persistent_workers_follow_a_step(client: Client) -> None:
    put(client, 8)
    loader = Loader(dataset(), num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    assert numbers(loader) == EIGHT
    for partition in ("q", "r"):
        put(client, 4, partition, start=100)
        loader.step(partition)
        assert numbers(loader) == [[100, 101], [102, 103]]
    put(client, 8, "s")
    loader.step("s")
    for data, _ in loader:
        assert data["x"].tolist() == [0, 1]
        break
    assert numbers(loader) == EIGHT, "the one in hand was not acknowledged"
    del loader


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("place", ["LeaseOwner.__init__", "Links.begin"])
def test_an_iteration_that_could_not_begin_does_not_disturb_the_next(
    client: Client, monkeypatch: pytest.MonkeyPatch, place: str, persistent: bool
) -> None:
    put(client, 8)
    loader = Loader(dataset(), num_workers=2, multiprocessing_context="fork", persistent_workers=persistent)
    kind, method = place.split(".")
    once(monkeypatch, getattr(streaming_dataloader, kind), method, DeadlineExceeded("no answer"))
    with pytest.raises(DeadlineExceeded):
        iter(loader)
    gc.collect()  # the workers of that one, where it had any
    assert numbers(loader) == EIGHT
    assert numbers(loader) == []


def once(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, error: Exception) -> None:
    """The next call of `method` raises."""
    real, errors = getattr(kind, method), [error]

    def call(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*args)

    monkeypatch.setattr(kind, method, call)


def test_persistent_workers_go_on_after_an_iteration_that_ended_before_they_had_begun(client: Client) -> None:
    put(client, 8)
    context = torch.multiprocessing.get_context("fork")
    go = context.Semaphore(0)
    loader = Loader(
        dataset(), 2, worker_init_fn=lambda worker: go.acquire(), multiprocessing_context=context,
        persistent_workers=True,
    )  # fmt: skip
    iter(loader).close()
    go.release(), go.release()
    assert numbers(loader) == EIGHT


def test_a_worker_that_is_killed_at_its_turn_keeps_nobody_waiting() -> None:
    """Wherever in `is_mine`, `pass_on` or `end` that is."""
    context = torch.multiprocessing.get_context("fork")
    places = 0
    while True:
        turn = Turn(context, 2)
        plan = LoaderPlan(turn.begin(0, False), "p", 0, frozenset(), b"", False)
        turn.grant(0)
        worker = context.Process(target=die_at, args=(places, turn, plan))
        worker.start()
        worker.join()
        parent = threading.Thread(target=go_on, args=(turn,), daemon=True)
        parent.start()
        parent.join(10)
        assert not parent.is_alive(), places
        if worker.exitcode == 0:
            break
        places += 1
    assert places > 10


def go_on(turn: Turn) -> None:
    """What the parent does."""
    turn.grant(1)
    turn.begin(0)


def die_at(place: int, turn: Turn, plan: LoaderPlan) -> None:
    """kill -9 of this process at the place of that number."""
    passed = itertools.count()

    def look(frame: Any, event: str, function: Any) -> None:
        if next(passed) == place:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(look)
    assert turn.is_mine(plan, 0)
    turn.pass_on(plan, 0)
    turn.end(plan, 0)
    os._exit(0)


def test_values_survive_the_way_from_a_worker(client: Client) -> None:
    rows = [torch.arange(n, dtype=torch.float32) for n in (3, 1, 2, 5)]
    columns = {
        "ragged": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "wide": torch.arange(400_000).view(4, 100_000),
        "text": NonTensorStack("a", "b", "c", "d"),
        "thing": NonTensorStack({"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}),
    }
    client.put(TensorDict(columns, batch_size=[4]), partition_id="p")
    stream = tq.StreamingDataset(None, 4, 2, sorted(columns), "p", "t", 0, should_check_consumption_status=True)
    found = list(Loader(stream, num_workers=1, multiprocessing_context="fork"))
    ragged = [row for data, _ in found for row in data["ragged"].unbind()]
    assert all(torch.equal(a, b) for a, b in zip(ragged, rows, strict=True))
    wide = torch.stack([row for data, _ in found for row in data["wide"].unbind()])
    assert torch.equal(wide, columns["wide"])
    assert [text for data, _ in found for text in data["text"]] == ["a", "b", "c", "d"]
    assert [thing["n"] for data, _ in found for thing in data["thing"]] == [1, 2, 3, 4]
    wide += 1
    for data, meta in found:
        client.put(TensorDict({"y": data["ragged"]}, batch_size=[2]), metadata=meta)
    assert client.check_production_status(["y"], "p")


def test_collate_runs_on_every_micro_batch_and_the_parent_acknowledges(client: Client) -> None:
    put(client, 8)
    loader = Loader(dataset(), num_workers=2, collate_fn=doubled, multiprocessing_context="fork")
    running = iter(loader)
    assert next(running) == [0, 2]
    assert used(client) == 0
    assert next(running) == [4, 6]
    assert used(client) == 2
    assert list(running) == [[8, 10], [12, 14]]
    assert used(client) == 8


def test_what_an_abandoned_iterator_had_comes_back_at_once(client: Client) -> None:
    put(client, 16)
    running = iter(Loader(dataset(), num_workers=2, multiprocessing_context="fork"))
    next(running), next(running)
    running.close()
    rest = client.get_meta(["x"], 14, "p", task_name="t", timeout_s=10)
    assert (rest.size, rest.redelivered) == (14, {}), "and counts as tried no more than without workers"
    assert used(client) == 16


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_was_closed_goes_on_elsewhere_though_its_iterator_is_still_held(
    client: Client, num_workers: int
) -> None:
    put(client, 4)
    loader = Loader(dataset(), num_workers, multiprocessing_context="fork" if num_workers else None)
    running = iter(loader)
    next(running)
    loader.close()
    loader.step("other")
    put(client, 4, "other")
    assert next(iter(loader))[0]["x"].tolist() == [0, 1]
    loader.close()


def test_workers_that_wait_for_rows_end_with_the_iterator(client: Client) -> None:
    put(client, 4)
    stream = dataset(should_check_consumption_status=False, prefetch=True)
    running = iter(Loader(stream, num_workers=2, multiprocessing_context="fork"))
    assert next(running)[0]["x"].tolist() == [0, 1]
    until(lambda: client.stats()["waiting_requests"] == 1, "a parked fetch of one worker; the other waits its turn")
    running.close()
    assert client.stats()["waiting_requests"] == 0


def refused(item: Any) -> Any:
    raise ValueError(f"not {item[0]['x'].tolist()}")


def test_workers_have_ended_when_the_error_of_one_is_raised(client: Client) -> None:
    """Not when the garbage collector comes upon them: it closes what would tell them of their end first."""
    put(client, 16)
    loader = Loader(dataset(), num_workers=2, multiprocessing_context="fork", collate_fn=refused)
    gc.disable()
    try:
        with pytest.raises(ValueError, match=r"not \[0, 1\]"):
            next(iter(loader))
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


def test_a_killed_worker_loses_nothing(client: Client) -> None:
    put(client, 16)
    loader = Loader(dataset(), num_workers=1, multiprocessing_context="fork", worker_init_fn=remember)
    running = iter(loader)
    next(running)
    (pid,) = client.kv_list("w")["w"].values()
    os.kill(pid["pid"], signal.SIGKILL)
    with pytest.raises((RuntimeError, OSError, EOFError)):
        list(running)
    running.close()  # torch's handler of dead workers may have raised outside of the iterator
    left = 16 - used(client)
    assert left >= 10
    assert client.get_meta(["x"], left, "p", task_name="t", timeout_s=10).size == left


def test_persistent_workers_of_which_one_was_killed_are_replaced_by_the_next_iteration(client: Client) -> None:
    client.set_partition("p", size=16)  # an interrupted acknowledgement may leave a part of a batch for the end
    put(client, 16)
    more: dict[str, Any] = {"persistent_workers": True, "worker_init_fn": remember}
    loader = Loader(dataset(), num_workers=2, multiprocessing_context="fork", **more)
    found = []
    with contextlib.suppress(RuntimeError):  # torch's handler of dead workers may raise anywhere
        for data, _ in loader:
            if not found:
                pids = [tag["pid"] for tag in client.kv_list("w")["w"].values()]
                os.kill(pids[0], signal.SIGKILL)
            found += data["x"].tolist()
    loader.close()
    assert used(client) < 16
    found = found[: used(client)]
    for data, _ in loader:
        found += data["x"].tolist()
    assert found == list(range(16))


def test_a_close_that_a_signal_interrupted_can_be_repeated(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    put(client, 16)
    running = iter(Loader(dataset(), num_workers=1, multiprocessing_context="fork"))
    next(running)
    join, interruptions = running._renewer.join, iter(["a worker died"])

    def interrupted() -> None:
        for text in interruptions:
            raise RuntimeError(text)
        join()

    monkeypatch.setattr(running._renewer, "join", interrupted)
    with pytest.raises(RuntimeError, match="a worker died"):
        running.close()
    running.close()
    assert client.get_meta(["x"], 16, "p", task_name="t", timeout_s=10).size == 16


def remember(worker: int) -> None:
    tq.kv_put(str(worker), "w", {"n": torch.tensor(worker)}, {"pid": os.getpid()})


def test_the_rows_of_a_killed_trainer_and_its_workers_come_back(client: Client, child: Callable[[str], Any]) -> None:
    put(client, 16)
    trainer = child("""
        import transfer_queue as tq
        stream = tq.StreamingDataset(None, 4, 2, ["x"], "p", "t", 0, lease_s=600)
        loader = iter(tq.StreamingDataLoader(stream, num_workers=2, multiprocessing_context="fork"))
        next(loader)
        data, _ = next(loader)
        print(*data["x"].tolist(), flush=True)
        input()
    """)
    assert trainer.line() == "2 3"
    trainer.kill()
    assert client.get_meta(["x"], 14, "p", task_name="t", timeout_s=10).size == 14


def test_a_loader_resumes(client: Client) -> None:
    put(client, 8)
    loader = Loader(dataset(), num_workers=2, multiprocessing_context="fork")
    running = iter(loader)
    next(running), next(running)
    state = json.loads(json.dumps(loader.state_dict()))
    running.close()
    again = Loader(dataset(), num_workers=2, multiprocessing_context="fork")
    again.load_state_dict(state)
    assert sorted(itertools.chain.from_iterable(numbers(again))) == [2, 3, 4, 5, 6, 7]
    assert used(client) == 8


def test_a_stream_with_workers_is_pickled_while_it_runs(client: Client) -> None:
    put(client, 8)
    client.set_partition("p", size=8)
    stream = tq.stream("p", ["x"], task="t", batch_size=4, num_workers=1, multiprocessing_context="fork")
    running = iter(stream)
    assert next(running)["x"].tolist() == [0, 1, 2, 3]
    copied = iter(pickle.loads(pickle.dumps(stream)))  # noqa: S301
    assert next(copied)["x"].tolist() == [4, 5, 6, 7]
    copied.close()
    assert [data["x"].tolist() for data in running] == [[4, 5, 6, 7]]
