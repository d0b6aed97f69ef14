"""The sequences of calls that vime's bridge and NeMo-RL's data plane make. `frameworks/` lets verl make its own."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib import resources
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict

import transfer_queue as tq

NewChild = Callable[[str], Any]
GROUP, GROUPS, RANKS = 2, 4, 2
ROWS = GROUP * GROUPS


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No service before the test, none after it."""
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", str(ROWS))
    yield
    tq.close()


@pytest.fixture
def loop() -> Iterator[Callable[[Any], Any]]:
    """Runs coroutines on an event loop in a thread of its own, as vime does, and waits for their results."""
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()

    def result(coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, running)
        return future.result(30)

    yield result
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


def rollout() -> TensorDict:
    """A vime rollout: lists of numbers became jagged columns, flat lists dense ones, the rest objects."""
    tokens = [torch.arange(2 + number) for number in range(ROWS)]
    return TensorDict(
        {
            "tokens": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
            "total_lengths": torch.tensor([len(row) for row in tokens]),
            "loss_masks": torch.nested.as_nested_tensor([torch.ones(3)] * ROWS, layout=torch.jagged),
            "rewards": torch.arange(float(ROWS)),
            "truncated": torch.zeros(ROWS, dtype=torch.bool),
            "rollout_routed_experts": torch.nested.as_nested_tensor(
                [torch.ones(len(row) - 1, 6, dtype=torch.int32) for row in tokens], layout=torch.jagged
            ),
            "metadata": torch.stack([NonTensorData({"row": number}) for number in range(ROWS)]),
            "arrays": NonTensorStack(*[np.arange(number) for number in range(ROWS)]),
        },
        batch_size=ROWS,
    )


def vime_config() -> Any:
    """As the bridge builds it: a sampler's instance in a DictConfig."""
    return OmegaConf.create(
        {
            "controller": {"sampler": tq.GRPOGroupNSampler(n_samples_per_prompt=GROUP), "polling_mode": True},
            "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 1}},
        },
        flags={"allow_objects": True},
    )


def fetch(task: str, fields: list[str], rank: int, partition: str = "train_0") -> tq.BatchMeta:
    sampling = {"dp_rank": rank, "task_name": task, "batch_index": 0, "partition_id": partition}
    return tq.get_client().get_meta(
        data_fields=fields, batch_size=ROWS // RANKS, partition_id=partition, sampling_config=sampling, task_name=task
    )


def test_a_step_of_vime(loop: Callable[[Any], Any], closed: None) -> None:
    config = tq.init(conf=vime_config())
    assert tq.init(config) is config  # connect(), in every actor
    client = tq.get_client()
    assert [p for p in loop(client.async_get_partition_list()) if p.startswith("train_")] == []
    meta = loop(client.async_put(data=rollout(), partition_id="train_0"))
    meta.update_custom_meta([{"total_lengths": 2 + number} for number in range(ROWS)])
    loop(client.async_set_custom_meta(meta))
    assert loop(client.async_get_partition_list()) == ["train_0"]

    fields = ["tokens", "total_lengths", "loss_masks", "rewards", "truncated", "rollout_routed_experts", "metadata"]
    taken: list[int] = []
    # the actor also asks for what the critic has not written yet
    assert [fetch("actor_train", [*fields, "values"], rank).size for rank in range(RANKS)] == [0, 0]
    for rank in range(RANKS):
        batch = fetch("critic_train", fields, rank)
        assert batch.size == ROWS // RANKS
        td, batch = pickle.loads(pickle.dumps([client.get_data(batch), batch]))  # noqa: S301  broadcast_object_list
        assert td["total_lengths"].tolist() == td["tokens"].offsets().diff().tolist()
        assert [custom["total_lengths"] for custom in batch.custom_meta] == td["total_lengths"].tolist()
        assert [row["row"] for row in list(td["metadata"])] == [int(reward) for reward in td["rewards"]]
        assert td["rollout_routed_experts"].unbind()[0].reshape(-1, 2, 3).dtype == torch.int32
        values = torch.nested.nested_tensor_from_jagged(td["tokens"].values() * 0.5, td["tokens"].offsets())
        loop(client.async_put(data=TensorDict({"values": values}, batch_size=batch.size), metadata=batch))
        taken += td["rewards"].int().tolist()
    assert sorted(taken) == list(range(ROWS))
    for rank in range(RANKS):
        batch = fetch("actor_train", [*fields, "values"], rank)
        assert batch.size == ROWS // RANKS
        assert fetch("actor_train", [*fields, "values"], rank).global_indexes == batch.global_indexes  # a late CP rank
        assert torch.equal(client.get_data(batch)["values"].values(), client.get_data(batch)["tokens"].values() * 0.5)
    assert client.check_consumption_status("actor_train", "train_0")
    loop(client.async_clear_partition(partition_id="train_0"))
    assert loop(client.async_get_partition_list()) == []


def test_workers_of_vime_attach_with_the_drivers_configuration(closed: None, child: NewChild) -> None:
    config = tq.init(conf=vime_config())
    worker = child(
        """
        import pickle, sys
        import transfer_queue as tq
        config = pickle.loads(bytes.fromhex(sys.stdin.readline()))
        assert tq.init(config) is config
        tq.get_client().put({"x": [1, 2]}, partition_id="train_1")
        """
    )
    worker.say(pickle.dumps(config).hex())
    worker.finish()
    assert tq.get_client().get_meta(["x"], 2, "train_1", task_name="t").size == 2


def test_rows_wait_for_no_group_that_is_incomplete(closed: None) -> None:
    tq.init(conf=vime_config())
    client = tq.get_client()
    meta = client.get_meta(["tokens"], ROWS, "train_0", mode="insert")
    client.put({"tokens": torch.arange(ROWS - 1)}, metadata=meta.select_samples(list(range(ROWS - 1))))
    assert fetch("actor_train", ["tokens"], 0).size == ROWS // RANKS
    assert fetch("actor_train", ["tokens"], 1).size == 0
    assert not client.check_consumption_status("actor_train", "train_0")
    client.put({"tokens": torch.arange(1)}, metadata=meta.select_samples([ROWS - 1]))
    assert fetch("actor_train", ["tokens"], 1).size == ROWS // RANKS


# --------------------------------------------------------------------- NeMo-RL's data plane


def nemo_config() -> Any:
    """Its adapter reads the packaged defaults and changes them."""
    conf = OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml"))
    conf.controller.polling_mode = True
    conf.backend.storage_backend = "SimpleStorage"
    conf.backend.SimpleStorage.total_storage_size = 1000
    conf.backend.SimpleStorage.num_data_storage_units = 2
    return conf


def test_the_data_plane_of_nemo(closed: None) -> None:
    tq.init(conf=nemo_config())
    client = tq.get_client()
    # register_partition: warms the schema up with a row of its own
    tq.kv_batch_put(keys=["__schema__"], partition_id="step_0", fields=samples(1))
    tq.kv_clear(keys=["__schema__"], partition_id="step_0")
    assert not (tq.kv_list("step_0") or {}).get("step_0")
    # put_samples
    keys = [f"sample_{number}" for number in range(4)]
    meta = tq.kv_batch_put(keys=keys, partition_id="step_0", fields=samples(4), tags=[{"len": n} for n in range(4)])
    assert meta.keys == keys
    assert sorted(tq.kv_list("step_0")["step_0"]) == keys
    # claim_meta: fetch, then the keys of the rows
    claimed = client.get_meta(
        data_fields=["input_ids", "input_lengths"],
        batch_size=3,
        partition_id="step_0",
        mode="fetch",
        task_name="logprobs",
    )
    names = client.kv_retrieve_keys(global_indexes=claimed.global_indexes, partition_id="step_0")
    assert sorted(names) == sorted(set(keys) & set(names))
    assert not client.check_consumption_status(task_name="logprobs", partition_id="step_0")
    # get_data, get_samples: uniform columns come nested and are stacked again
    td = tq.kv_batch_get(keys=names, partition_id="step_0", select_fields=["input_ids", "input_lengths"])
    dense = torch.stack(list(td["input_ids"].unbind()))
    assert dense.shape == (3, 5)
    assert td["input_lengths"].shape == (3,) or td["input_lengths"].is_nested
    extra = TensorDict({"prev_logprobs": dense.float()}, batch_size=3)
    tq.kv_batch_put(keys=names, partition_id="step_0", fields=extra)
    assert client.get_meta(["prev_logprobs"], 3, "step_0", mode="fetch", task_name="train").size == 3
    assert client.get_meta(["input_ids"], 3, "step_0", mode="fetch", task_name="logprobs").size == 0
    assert client.get_meta(["input_ids"], 1, "step_0", mode="fetch", task_name="logprobs").size == 1
    # clear_samples, and once more
    for _ in range(2):
        tq.kv_clear(keys=keys, partition_id="step_0")
    assert tq.kv_list("step_0") == {}


def test_object_columns_of_nemo_have_one_item_per_row(closed: None) -> None:
    """Its rollout actor puts `message_log` and `content` as NumPy arrays of objects, in a TensorDict."""
    tq.init(conf=nemo_config())
    # register_partition: every field is a number first, of a row that is cleared again
    warmup = TensorDict({name: torch.zeros(1) for name in ("input_ids", "message_log", "content")}, batch_size=[1])
    tq.kv_batch_put(keys=["__schema__"], partition_id="step_0", fields=warmup, tags=[{}])
    tq.kv_clear(keys=["__schema__"], partition_id="step_0")
    keys = [f"sample_{number}" for number in range(4)]
    logs = [
        [{"role": "user", "content": f"what is {n} ?", "token_ids": torch.arange(n + 1)} for _ in range(n)]
        for n in range(4)
    ]
    texts = [f"answer {n} " * (n + 1) for n in range(4)]
    columns = {"message_log": objects(logs), "content": objects(texts), "input_ids": torch.arange(20).view(4, 5)}
    batch = TensorDict(columns, batch_size=[4]).detach()
    tq.kv_batch_put(keys=keys, partition_id="step_0", fields=batch, tags=[{} for _ in keys])
    for chosen in ([0, 1, 2, 3], [2], [3, 1]):
        td = tq.kv_batch_get(
            keys=[keys[n] for n in chosen], partition_id="step_0", select_fields=["message_log", "content", "input_ids"]
        )
        found = dict(td.items(include_nested=False))
        assert isinstance(found["content"], NonTensorStack)
        assert found["content"].tolist() == [texts[n] for n in chosen]
        got = found["message_log"].tolist()
        assert [[turn["content"] for turn in log] for log in got] == [[f"what is {n} ?"] * n for n in chosen]
        assert [[turn["token_ids"].tolist() for turn in log] for log in got] == [
            [list(range(n + 1))] * n for n in chosen
        ]
        again = TensorDict(found, batch_size=td.batch_size)  # its adapter rebuilds what it reads
        assert again.get("content").tolist() == [texts[n] for n in chosen]


def objects(items: list[Any]) -> np.ndarray:
    column = np.empty(len(items), dtype=object)
    column[:] = items
    return column


def test_the_data_plane_of_nemo_opens_again_after_it_was_closed(closed: None) -> None:
    for turn in range(2):
        assert tq.init(conf=nemo_config()).backend.SimpleStorage.total_storage_size == 1000
        tq.kv_batch_put(keys=["a"], partition_id="p", fields=samples(1), tags=[{"turn": turn}])
        assert tq.kv_list() == {"p": {"a": {"turn": turn}}}
        tq.close()


def samples(count: int) -> TensorDict:
    return TensorDict(
        {
            "input_ids": torch.arange(5 * count).view(count, 5),
            "input_lengths": torch.full((count, 1), 5),  # the adapter gives every column two dimensions
            "sample_mask": torch.ones(count, 1),
            "token_mask": torch.ones(count, 5),
        },
        batch_size=count,
    )


# ------------------------------------------------------------ what all of them do to a batch


def test_what_frameworks_do_with_a_batch(shared: tq.TransferQueueClient) -> None:
    keys = list("abc")
    rows = [torch.arange(n) for n in (1, 3, 2)]
    columns = {
        "ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "even": torch.arange(6).view(3, 2),
        "score": torch.arange(3.0),
        "uid": NonTensorStack("u0", "u1", "u2"),
        "info": NonTensorStack({"a": 1}, {"a": [2]}, {}),
    }
    tq.kv_batch_put(keys=keys, partition_id="b", fields=TensorDict(columns, batch_size=3))
    td = tq.kv_batch_get(keys=keys, partition_id="b")
    assert td["ids"].offsets().tolist() == [0, 1, 4, 6]
    assert td["even"].offsets().diff().tolist() == [2, 2, 2]
    assert list(td["uid"]) == ["u0", "u1", "u2"]
    assert td.get("info").tolist() == [{"a": 1}, {"a": [2]}, {}]
    first = td[0]
    assert first["ids"].tolist() == [0]
    assert first["even"].tolist() == [0, 1]
    assert first["uid"] == "u0"
    assert first["info"] == {"a": 1}
    assert td.pop("uid").tolist() == ["u0", "u1", "u2"]
    assert td.pop("missing", None) is None
    padded = td.to_padded_tensor(-1)
    assert padded["ids"].tolist() == [[0, -1, -1], [0, 1, 2], [0, 1, -1]]
    td["score"] = td["score"] * 2
    tq.kv_batch_put(keys=keys, partition_id="b", fields=td.select("score", "ids"))
    assert tq.kv_batch_get(keys=keys[::-1], partition_id="b")["score"].tolist() == [4.0, 2.0, 0.0]
    tq.kv_clear(keys=keys, partition_id="b")
    td["ids"].values().zero_()
    assert td["ids"].values().tolist() == [0] * 6
