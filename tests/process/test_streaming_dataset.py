"""StreamingDataset: what it yields, what it acknowledges and when, and what becomes of the rest."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import freeze, until
from streams import dataset, numbers, put, used
from tensordict import NonTensorData, NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue.codec.nested import strided
from transfer_queue.dataloader.acks import Acks
from transfer_queue.dataloader.feed import Feed
from transfer_queue.dataloader.lease_owner import LeaseOwner
from transfer_queue.dataloader.streaming_dataset import chunk_batch_fn, default_fetch_batch_fn
from transfer_queue.errors import DeadlineExceeded, InternalError, InvalidInput
from transfer_queue.metadata import BatchMeta

Client = tq.TransferQueueClient


@pytest.mark.parametrize(
    "bad",
    [
        {"micro": 0},
        {"data_fields": []},
        {"dp_rank": -1},
        {"lease_s": 0.0},
        {"lease_s": float("inf")},
        {"dp_rank": "0"},
        {"dp_size": 1.5},
        {"lease_s": "1"},
    ],
)
def test_bad_arguments_are_value_errors(bad: dict[str, Any]) -> None:
    terms = {"batch_size": 4, "micro_batch_size": bad.pop("micro", 2), "data_fields": ["x"], "partition_id": "p"}
    with pytest.raises(ValueError):
        tq.StreamingDataset(**{"config": None, "task_name": "t", "dp_rank": 0, **terms, **bad})


# chunks


def test_T15_data_and_metadata_are_split_alike() -> None:
    meta = BatchMeta(range(10), ["p"] * 10)
    parts = chunk_batch_fn(TensorDict({"x": torch.arange(10)}, batch_size=[10]), meta, 4)
    assert [data["x"].tolist() for data, _ in parts] == [part.global_indexes for _, part in parts]
    assert [len(part) for _, part in parts] == [4, 4, 2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_every_kind_of_column_is_split() -> None:
    rows = [torch.arange(n) for n in (1, 3, 2)]
    turned = [torch.arange(2 * n).view(2, n) for n in (1, 3, 2)]
    columns = {
        "jagged": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "turned": torch.nested.as_nested_tensor([t.T for t in turned], layout=torch.jagged).transpose(1, 2),
        "strided": torch.nested.as_nested_tensor(rows, layout=torch.strided),
        "text": NonTensorStack("a", "b", "c"),
    }
    whole = TensorDict(columns, batch_size=[3])
    parts = chunk_batch_fn(whole, BatchMeta(range(3), ["p"] * 3), 2)
    assert [len(data) for data, _ in parts] == [2, 1]
    for name, expected in (("jagged", rows), ("strided", rows), ("turned", turned)):
        found = [row for data, _ in parts for row in data[name].unbind()]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert parts[0][0][name].layout == whole[name].layout
    assert [text for data, _ in parts for text in data["text"]] == ["a", "b", "c"]
    assert len(whole.keys()) == 4, "the batch keeps its columns"


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float32], ids=str)
def test_rows_that_differ_in_two_dimensions_are_split_whatever_their_dtype(dtype: torch.dtype) -> None:
    values = torch.arange(11 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    sizes = torch.tensor([[2, 3], [1, 4], [1, 1]])
    rows = [(2, 3), (1, 4), (1, 1)]
    whole = TensorDict({"x": strided(values, sizes)}, batch_size=[3])
    parts = [data["x"] for data, _ in chunk_batch_fn(whole, BatchMeta(range(3), ["p"] * 3), 2)]
    assert [tuple(row.shape) for part in parts for row in part.unbind()] == rows
    assert b"".join(bytes(part.values().view(torch.uint8).tolist()) for part in parts) == bytes(
        range(len(values) * dtype.itemsize)
    )


@pytest.mark.parametrize("size", [1, 2])
def test_values_keep_their_types_in_parts(size: int) -> None:
    shapes = [torch.Size([1, 2]), (3, 4)]
    whole = TensorDict({"shape": NonTensorStack(*map(NonTensorData, shapes))}, batch_size=[2])
    parts = chunk_batch_fn(whole, BatchMeta(range(2), ["p"] * 2), size)
    found = [shape for data, _ in parts for shape in data.get("shape").tolist()]
    assert list(map(type, found)) == [torch.Size, tuple]


def test_bad_chunks_are_refused() -> None:
    meta, data = BatchMeta(range(2), ["p"] * 2), TensorDict({"x": torch.arange(2)}, batch_size=[2])
    with pytest.raises(TypeError):
        chunk_batch_fn({"x": 1}, meta, 1)  # type: ignore[arg-type]
    for size in (0, -1, 3, 1.5):
        with pytest.raises(ValueError):
            chunk_batch_fn(data, meta, size)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        chunk_batch_fn(TensorDict({}, batch_size=[]), meta, 1)
    with pytest.raises(ValueError):
        chunk_batch_fn(data, meta[:1], 1)


# streams


def test_a_partition_comes_once_and_ends(client: Client) -> None:
    put(client, 10)
    stream = dataset(batch=5)
    assert numbers(stream) == [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9]]
    assert client.check_consumption_status("t", "p")
    assert numbers(stream) == []


def test_rows_written_later_are_waited_for(client: Client) -> None:
    stream = iter(dataset(batch=2, should_check_consumption_status=False))
    got: list[list[int]] = []
    reader = threading.Thread(target=lambda: got.extend(numbers([next(stream), next(stream)])))
    reader.start()
    until(lambda: client.stats()["waiting_requests"] == 1, "a parked fetch")
    put(client, 4)
    reader.join(10)
    assert got == [[0, 1], [2, 3]]


def test_results_go_back_to_their_rows(client: Client) -> None:
    put(client, 10)
    for data, meta in dataset(batch=10, micro=4):
        client.put(TensorDict({"y": data["x"] * 2}, batch_size=data.batch_size), metadata=meta)
    both = client.get_data(client.get_meta(["x", "y"], 10, "p", task_name="check", timeout_s=5))
    assert torch.equal(both["y"], both["x"] * 2)


def test_the_wait_ends_when_another_rank_uses_the_rest(client: Client) -> None:
    put(client, 4)
    held = client.get_meta(["x"], 4, "p", task_name="t", lease_s=60)
    got: list[list[int]] = []
    reader = threading.Thread(target=lambda: got.extend(numbers(dataset())))
    reader.start()
    until(lambda: client.stats()["waiting_requests"] == 1, "a parked fetch")
    client.ack(held)
    reader.join(10)
    assert not reader.is_alive()
    assert got == []


def test_asking_for_the_next_acknowledges_the_one_before(client: Client) -> None:
    put(client, 8)
    stream = iter(dataset())
    next(stream)
    assert used(client) == 0
    next(stream)
    until(lambda: used(client) == 2, "the acknowledgement, which nobody waits for")
    assert numbers(stream) == [[4, 5], [6, 7]]
    assert used(client) == 8


def test_without_leases_rows_are_used_when_their_batch_starts(client: Client) -> None:
    put(client, 8)
    stream = iter(dataset(lease_s=None))
    data, meta = next(stream)
    assert (data["x"].tolist(), meta.lease, used(client)) == ([0, 1], 0, 4)
    del stream
    gc.collect()
    assert client.get_meta(["x"], 4, "p", task_name="t", timeout_s=5).size == 4, "what was fetched ahead is not lost"


def test_a_lease_is_kept_alive_while_the_consumer_works(client: Client) -> None:
    put(client, 4)
    stream = iter(dataset(lease_s=0.4))
    next(stream)
    with pytest.raises(DeadlineExceeded):
        client.get_meta(["x"], 4, "p", task_name="t", timeout_s=1.5)
    assert numbers(stream) == [[2, 3]]


@pytest.mark.parametrize("kind", [InternalError, OSError])
def test_a_renewal_that_fails_in_whatever_way_keeps_no_loop_waiting(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    failed = threading.Event()

    def renew(*_: Any) -> None:
        failed.set()
        raise kind("a renewal")

    monkeypatch.setattr(LeaseOwner, "renew", renew)
    running = iter(dataset(lease_s=0.3))
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(next, running)
        assert failed.wait(20)
        put(client, 4)
        assert found.result(20)[0]["x"].tolist() == [0, 1]
    running.close()


def test_a_loop_whose_thread_has_died_hears_of_it(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(LeaseOwner, "keep", lambda *_: 1 / 0)
    running = iter(dataset(lease_s=0.3))
    with pytest.raises(InternalError) as raised:
        next(running)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_reset_replays_the_buffer_and_step_moves_on(client: Client) -> None:
    put(client, 8)
    stream = dataset()
    for _ in stream:
        break
    assert len(stream.buffer) == 1
    stream.reset()
    assert used(client) == 2, "what was delivered is used"
    assert numbers(stream) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    stream.reset()
    assert numbers(stream) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    put(client, 4, "q", start=100)
    stream.step("q")
    assert stream.buffer == []
    assert numbers(stream) == [[100, 101], [102, 103]]


def test_a_batch_that_comes_again_has_nothing_to_acknowledge_once_all_of_it_was_used(client: Client) -> None:
    """The service forgets leases of which nothing is left, after 16,384 others."""
    put(client, 8)
    stream = dataset()
    running = iter(stream)
    assert all(next(running)[1].lease for _ in range(3))
    assert [meta.lease > 0 for _, meta in stream.buffer] == [False, True]
    stream.reset()
    again = iter(stream)
    assert [meta.lease > 0 for _, meta in (next(again) for _ in range(4))] == [False, False, True, True]
    again.close()
    assert used(client) == 6


@pytest.mark.parametrize("move", ["reset", "step"])
def test_what_was_fetched_ahead_is_given_back(client: Client, move: str) -> None:
    put(client, 8)
    stream = dataset(prefetch=True)
    running = iter(stream)
    next(running)
    until(lambda: not fetchable(client), "the second batch was fetched ahead")
    stream.reset() if move == "reset" else stream.step("q")
    assert client.get_meta(["x"], 4, "p", task_name="t", timeout_s=5, lease_s=60).size == 4
    running.close()


def fetchable(client: Client) -> bool:
    """Whether rows are on offer; they stay so."""
    try:
        client.release(client.get_meta(["x"], 1, "p", task_name="t", timeout_s=0, lease_s=60))
    except DeadlineExceeded:
        return False
    return True


def test_a_step_in_mid_batch_gives_back_what_was_not_delivered(client: Client) -> None:
    put(client, 8)
    put(client, 4, "q", start=100)
    stream = dataset()
    running = iter(stream)
    next(running)
    stream.step("q")
    assert numbers(running) == [[100, 101], [102, 103]]
    rest = client.get_meta(["x"], 6, "p", task_name="t", timeout_s=5)
    assert client.get_data(rest)["x"].tolist() == [2, 3, 4, 5, 6, 7]


def test_a_loop_that_was_left_goes_on_where_it_was(client: Client) -> None:
    put(client, 8)
    stream = dataset()
    for data, _ in stream:
        assert data["x"].tolist() == [0, 1]
        break
    assert numbers(stream) == [[2, 3], [4, 5], [6, 7]]


def test_a_stream_without_ranks_takes_nothing_ahead(client: Client) -> None:
    put(client, 8)
    stream = iter(dataset())
    next(stream)
    assert client.get_meta(["x"], 4, "p", task_name="t", timeout_s=0).size == 4
    assert numbers(stream) == [[2, 3]]


def test_a_dataset_that_nobody_refers_to_leaves_nothing_behind(client: Client, no_collections: None) -> None:
    """At once: the next loop does not wait for the collector, or for leases to end."""
    put(client, 8)
    stream = dataset()
    running = iter(stream)
    next(running)
    del stream, running
    assert not [thread for thread in threading.enumerate() if thread.name == "tq-prefetch"]
    assert client.get_meta(["x"], 8, "p", task_name="t", timeout_s=5).size == 8


def test_interrupts_as_a_loop_is_left_do_not_keep_its_leases_alive(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, 8)
    running = iter(dataset(lease_s=0.3))
    next(running), next(running)
    for kind, method in ((Acks, "confirm_pending"), (Feed, "close")):
        monkeypatch.setattr(kind, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.close()
    del running
    until(lambda: "tq-prefetch" not in [thread.name for thread in threading.enumerate()], "the end of its thread", 10)
    assert client.get_meta(["x"], 6, "p", task_name="t", timeout_s=5).size == 6


def interrupted(*args: Any) -> None:
    raise KeyboardInterrupt


# functions of the user


def test_own_functions_get_the_documented_arguments(client: Client) -> None:
    put(client, 4)
    threads = []

    def fetch(**kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        assert list(kwargs) == [
            "tq_client", "data_fields", "batch_size", "partition_id", "task_name", "sampling_config", "batch_index",
        ]  # fmt: skip
        if len(threads) == 1:
            return None, BatchMeta.empty()
        return default_fetch_batch_fn(**kwargs)

    def process(td: TensorDict, meta: BatchMeta, micro_batch_size: int) -> Any:
        yield (td["x"] * micro_batch_size).tolist()

    assert list(dataset(fetch_batch_fn=fetch, process_batch_fn=process)) == [[0, 2, 4, 6]]
    assert set(threads) == {threading.main_thread()}
    assert used(client) == 4


@pytest.mark.parametrize("declared", [8, None])
def test_a_stream_over_an_own_function_ends_though_its_rows_were_cleared(client: Client, declared: int | None) -> None:
    client.set_partition("p", size=declared)
    put(client, 8)
    found = []
    for data, meta in dataset(fetch_batch_fn=lambda **asked: default_fetch_batch_fn(**asked), batch=4, micro=4):
        found.append(data["x"].tolist())
        client.clear_samples(meta)
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_stream_over_an_own_function_waits_for_the_next_round_where_all_was_cleared(client: Client) -> None:
    client.set_partition("p", size=4)
    client.clear_samples(put(client, 4))
    calls = []

    def fetch(**kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            put(client, 4, start=4)
        return default_fetch_batch_fn(**kwargs) if len(calls) > 1 else (None, BatchMeta.empty())

    assert numbers(dataset(fetch_batch_fn=fetch, batch=4, micro=4)) == [[4, 5, 6, 7]]


@pytest.mark.parametrize("answer", [None, torch.zeros(2), (torch.zeros(2),), (torch.zeros(2), None)])
def test_what_an_own_function_returns_is_data_and_metadata(client: Client, answer: Any) -> None:
    put(client, 4)
    with pytest.raises(InvalidInput, match="fetch_batch_fn returns"):
        next(iter(dataset(fetch_batch_fn=lambda **asked: answer)))


@pytest.mark.parametrize("process", [lambda td, meta, micro_batch_size: [], lambda td, meta, micro_batch_size: [1, 2]])
def test_whatever_a_batch_becomes_it_is_acknowledged_as_a_whole(client: Client, process: Any) -> None:
    put(client, 8)
    assert list(dataset(process_batch_fn=process)) in ([], [1, 2, 1, 2])
    assert used(client) == 8


def test_an_error_of_a_fetch_reaches_the_consumer(client: Client) -> None:
    put(client, 2)
    stream = dataset()
    stream.batch_size = 0
    with pytest.raises(ValueError, match="batch_size"):
        next(iter(stream))


# state, copies, other processes


@pytest.mark.parametrize(
    "change",
    [
        {"partition_id": None},
        {"batch_index": "x"},
        {"used_rows": 5},
        {"used_rows": [0.5]},
        {"returned_rows": 5},
        {"service": "x"},
        {"service": 5},
    ],
)
def test_a_state_that_is_none_is_refused_and_the_stream_goes_on(client: Client, change: dict[str, Any]) -> None:
    put(client, 4)
    stream = dataset()
    running = iter(stream)
    next(running)
    state = stream.state_dict()
    with pytest.raises(InvalidInput, match="state"):
        stream.load_state_dict({**state, "partition_id": "elsewhere", **change})
    with pytest.raises(InvalidInput, match="state"):
        stream.load_state_dict({"partition_id": "elsewhere"})
    assert stream.state_dict() == state
    assert [row for batch, _ in running for row in batch["x"].tolist()] == [2, 3]


def test_a_stream_resumes_with_what_was_not_acknowledged(client: Client) -> None:
    put(client, 8)
    first = dataset()
    running = iter(first)
    next(running), next(running)
    state = json.loads(json.dumps(first.state_dict()))
    assert state["partition_id"] == "p"
    assert len(state["used_rows"]) == 2
    del first, running
    gc.collect()
    second = dataset()
    second.load_state_dict(state)
    assert numbers(second) == [[2, 3], [4, 5], [6, 7]]
    assert used(client) == 8


def test_a_pickled_dataset_starts_with_a_client_of_its_own(client: Client) -> None:
    put(client, 4)
    stream = dataset()
    next(iter(stream))
    copy = pickle.loads(pickle.dumps(stream))  # noqa: S301
    assert copy.buffer == []
    copy.step("q")
    assert used(client) == 0, "the copy acknowledges nothing of the original"


CONSUMER = """
    import transfer_queue as tq
    stream = iter(tq.StreamingDataset(None, 4, 2, ["x"], "p", "t", 0, lease_s={lease_s}))
    data, meta = next(stream)
    print(*data["x"].tolist(), flush=True)
    input()
    try:
        next(stream)
        print("next", flush=True)
    except tq.errors.LeaseExpired:
        print("LeaseExpired", flush=True)
"""


def test_the_batch_of_a_killed_consumer_goes_to_another(client: Client, child: Callable[[str], Any]) -> None:
    put(client, 4)
    consumer = child(CONSUMER.format(lease_s=600))
    assert consumer.line() == "0 1"
    consumer.kill()
    assert numbers(dataset()) == [[0, 1], [2, 3]]


def test_a_frozen_consumer_learns_that_it_lost_its_batch(client: Client, child: Callable[[str], Any]) -> None:
    put(client, 4)
    consumer = child(CONSUMER.format(lease_s=0.5))
    assert consumer.line() == "0 1"
    freeze(consumer.pid)
    assert numbers(dataset()) == [[0, 1], [2, 3]]
    os.kill(consumer.pid, signal.SIGCONT)
    consumer.say()
    assert consumer.line() == "LeaseExpired"
    consumer.finish()
