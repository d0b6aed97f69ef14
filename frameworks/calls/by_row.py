"""`TransferQueueClient`: rows by position."""

from __future__ import annotations

from typing import Any

import torch
from cases import attempt, batch, case, jagged, plain
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq


@case
def insert_then_put() -> Any:
    client = tq.get_client()
    meta = client.get_meta(["x"], 3, "insert", mode="insert")
    before = plain(meta)
    after = client.put(batch(3, x=torch.arange(3), y=torch.ones(3, 2)), metadata=meta)
    return before, plain(after), after is meta, attempt(client.get_data, meta)


@case
def put_and_fetch_in_order() -> Any:
    client = tq.get_client()
    client.put(batch(4, x=torch.arange(4)), partition_id="fetch")
    first = client.get_meta(["x"], 3, "fetch", task_name="t")
    return [
        plain(first),
        attempt(client.get_data, first),
        attempt(client.get_meta, ["x"], 2, "fetch", task_name="t"),
        attempt(client.check_consumption_status, "t", "fetch"),
        attempt(client.get_meta, ["x"], 1, "fetch", task_name="t"),
        attempt(client.check_consumption_status, "t", "fetch"),
        attempt(client.get_meta, ["x"], 4, "fetch", task_name="u"),
        attempt(client.reset_consumption, "fetch", "t"),
        attempt(client.get_meta, ["x"], 4, "fetch", task_name="t"),
    ]


@case
def fetch_of_what_is_not_there() -> Any:
    client = tq.get_client()
    client.put(batch(2, x=torch.arange(2)), partition_id="absent")
    return [
        attempt(client.get_meta, ["y"], 1, "absent", task_name="t"),
        attempt(client.get_meta, ["x"], 1, "no such partition", task_name="t"),
        attempt(client.get_meta, ["x"], 1, "absent"),
        attempt(client.get_meta, ["x"], 1, "absent", mode="unknown", task_name="t"),
        attempt(client.get_meta, ["x"], 1, "no such partition", mode="force_fetch"),
        attempt(client.get_meta, ["x"], 0, "absent", task_name="t"),
    ]


@case
def status_of_a_partition() -> Any:
    client = tq.get_client()
    meta = client.put(batch(2, x=torch.arange(2)), partition_id="status")
    client.put(batch(1, y=torch.ones(1)), metadata=meta.select_samples([1]))
    client.get_meta(["y"], 1, "status", task_name="t")
    unknown = [client.get_production_status(["q"], "status"), client.get_consumption_status("t", "unknown")]
    return [
        plain(client.get_production_status(["x"], "status")[1]),
        plain(client.get_production_status(["y"], "status")[1]),
        plain(client.get_consumption_status("t", "status")[1]),
        attempt(client.check_production_status, ["x"], "status"),
        attempt(client.check_production_status, ["y"], "status"),
        plain(unknown),
    ]


@case
def keys_and_rows() -> Any:
    client = tq.get_client()
    tq.kv_batch_put(keys=["a", "b"], partition_id="keys", fields=batch(2, x=torch.arange(2)), tags=[{"n": 0}, {"n": 1}])
    meta = client.kv_retrieve_meta(keys=["b", "a"], partition_id="keys")
    return [
        plain(meta),
        attempt(client.kv_retrieve_keys, meta.global_indexes, "keys"),
        attempt(client.kv_retrieve_meta, ["b", "gone"], "keys"),
        attempt(client.kv_retrieve_meta, ["gone"], "keys"),
        attempt(client.kv_retrieve_meta, ["new"], "keys", create=True),
        attempt(client.kv_retrieve_meta, [], "keys"),
        attempt(client.kv_retrieve_keys, meta.global_indexes, "no such partition"),
        tq.kv_list("keys"),
    ]


@case
def tags_by_row() -> Any:
    client = tq.get_client()
    meta = client.put(batch(2, x=torch.zeros(2)), partition_id="custom")
    meta.update_custom_meta([{"total_lengths": 3}, {"total_lengths": 5}])
    client.set_custom_meta(meta)
    fetched = client.get_meta(["x"], 2, "custom", task_name="t")
    return plain(fetched.get_all_custom_meta()), plain(fetched.custom_meta)


@case
def clearing_rows_and_partitions() -> Any:
    client = tq.get_client()
    meta = client.put(batch(3, x=torch.arange(3)), partition_id="rows")
    client.clear_samples(meta.select_samples([1]))
    left = attempt(client.get_data, meta.select_samples([0, 2]))
    gone = attempt(client.get_data, meta.select_samples([1]))
    listed = ["rows" in client.get_partition_list()]
    client.clear_partition("rows")
    listed.append("rows" in client.get_partition_list())
    return (
        left,
        gone,
        listed,
        attempt(client.clear_partition, "rows"),
        attempt(client.clear_partition, "no such partition"),
    )


@case
def wrong_puts_through_the_client() -> Any:
    client = tq.get_client()
    meta = client.put(batch(2, x=torch.arange(2)), partition_id="wrong")
    return [
        attempt(client.put, batch(2, x=torch.arange(2))),
        attempt(client.put, batch(1, y=torch.ones(1)), metadata=meta),
        attempt(client.put, batch(3, y=torch.ones(3)), metadata=meta),
        attempt(client.put, batch(2, y=torch.ones(2)), metadata=tq.BatchMeta.empty()),
        attempt(client.put, TensorDict({}, batch_size=0), partition_id="wrong"),
        attempt(client.get_data, tq.BatchMeta.empty()),
        attempt(client.get_data, None),
    ]


@case
def shapes_and_dtypes_of_metadata() -> Any:
    client = tq.get_client()
    ragged = jagged(torch.ones(1), torch.ones(3))
    client.put(
        batch(2, x=ragged, y=torch.zeros(2, 4), z=torch.zeros(2), o=NonTensorStack("a", 1)), partition_id="shapes"
    )
    meta = client.get_meta(["x", "y", "z", "o"], 2, "shapes", task_name="t")
    shapes = {name: [None if shape is None else list(shape) for shape in meta.get_shapes(name)] for name in "xyz"}
    return [str(meta.get_dtypes(name)) for name in meta.field_names], shapes["x"], shapes["y"], shapes["z"]
