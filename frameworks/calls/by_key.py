"""The key-value interface."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from cases import attempt, batch, case, jagged, plain, rows
from tensordict import NonTensorData, NonTensorStack

import transfer_queue as tq


@case
def put_of_a_dict() -> Any:
    fields = {"t": torch.tensor([1.0, 2.0]), "z": torch.tensor(3), "s": "text", "l": [1, 2], "d": {"a": 1}, "n": None}
    return attempt(tq.kv_put, "k", "dict", fields, {"a": 1}), attempt(tq.kv_batch_get, "k", "dict")


@case
def put_of_an_array() -> Any:
    tq.kv_put("k", "array", {"a": np.arange(3)})
    return attempt(tq.kv_batch_get, "k", "array")


@case
def put_of_a_tensordict() -> Any:
    return attempt(tq.kv_put, "k", "td", batch(1, x=torch.ones(1, 2))), attempt(
        tq.kv_put, "k2", "td", batch(2, x=torch.ones(2))
    )


@case
def put_of_nothing() -> Any:
    return (
        attempt(tq.kv_put, "k", "nothing"),
        attempt(tq.kv_batch_put, keys=["k"], partition_id="nothing"),
        tq.kv_list("nothing"),
    )


@case
def put_of_wrong_types() -> Any:
    return [
        attempt(tq.kv_put, "k", "types", [1, 2]),
        attempt(tq.kv_put, "k", "types", {"x": jagged(torch.ones(1), torch.ones(2))}),
        attempt(tq.kv_batch_put, keys=("a", "b"), partition_id="types", fields=batch(2, x=torch.ones(2))),
        attempt(tq.kv_batch_put, keys=[1], partition_id="types", fields=batch(1, x=torch.ones(1))),
        attempt(tq.kv_batch_put, keys=[], partition_id="types", tags=[]),
    ]


@case
def put_of_wrong_sizes() -> Any:
    return [
        attempt(tq.kv_batch_put, keys=["a"], partition_id="sizes", fields=batch(2, x=torch.ones(2))),
        attempt(tq.kv_batch_put, keys=["a", "b"], partition_id="sizes", fields=batch(2, x=torch.ones(2)), tags=[{}]),
        attempt(tq.kv_batch_put, keys=["a", "a"], partition_id="sizes", fields=batch(2, x=torch.ones(2))),
    ]


@case
def what_is_left_of_refused_puts() -> Any:
    return [tq.kv_list(partition) for partition in ("types", "sizes")]


@case
def put_of_tags_alone() -> Any:
    first = attempt(tq.kv_batch_put, keys=["b", "a"], partition_id="tags", tags=[{"n": 1}, {"n": 2}])
    return (
        first,
        tq.kv_list("tags"),
        attempt(tq.kv_batch_get, ["a"], "tags"),
        attempt(tq.kv_put, "b", "tags", tag={"m": 3}),
    )


@case
def tags_merge_and_are_returned_in_the_order_of_the_call() -> Any:
    tq.kv_batch_put(keys=["a", "b"], partition_id="merge", tags=[{"n": 1, "s": "x"}, {"n": 2}])
    meta = attempt(tq.kv_batch_put, keys=["b", "a"], partition_id="merge", fields=batch(2, x=torch.tensor([2, 1])))
    return meta, attempt(tq.kv_put, "a", "merge", tag={"s": "y", "deep": {"k": [1, None, 2.5]}}), tq.kv_list("merge")


@case
def fields_of_the_returned_metadata() -> Any:
    first = attempt(tq.kv_put, "a", "fields", {"x": torch.ones(1), "w": "s"})
    second = attempt(tq.kv_batch_put, keys=["a", "b"], partition_id="fields", fields=batch(2, y=torch.ones(2)))
    return first, second, attempt(tq.kv_put, "b", "fields", {"x": torch.ones(1)})


@case
def upsert() -> Any:
    tq.kv_put("a", "upsert", {"x": torch.tensor([1.0]), "y": torch.tensor([2.0])})
    tq.kv_put("a", "upsert", {"y": torch.tensor([3.0, 4.0]), "z": torch.tensor(5)})
    return attempt(tq.kv_batch_get, "a", "upsert")


@case
def get_in_the_order_of_the_call() -> Any:
    with rows("order", 4, x=torch.arange(4)) as keys:
        return [attempt(tq.kv_batch_get, chosen, "order") for chosen in (keys[::-1], ["r2", "r2", "r0"], "r3")]


@case
def get_of_what_is_missing() -> Any:
    with rows("missing", 2, x=torch.arange(2), y=torch.arange(2.0)):
        return [
            attempt(tq.kv_batch_get, ["r0", "gone", "r1"], "missing"),
            attempt(tq.kv_batch_get, ["gone"], "missing"),
            attempt(tq.kv_batch_get, ["r0"], "no such partition"),
            attempt(tq.kv_batch_get, ["r0"], "missing", ["x", "unknown"]),
            attempt(tq.kv_batch_get, ["r0"], "missing", ["unknown"]),
            attempt(tq.kv_batch_get, ["r0"], "missing", "y"),
            attempt(tq.kv_batch_get, [], "missing"),
            attempt(tq.kv_batch_get, ("r0",), "missing"),
        ]


@case
def get_of_fields_that_not_all_rows_have() -> Any:
    tq.kv_put("a", "some", {"x": torch.ones(1), "y": torch.ones(1)})
    tq.kv_put("b", "some", {"x": torch.zeros(1)})
    tq.kv_put("c", "some", tag={"empty": True})
    return [
        attempt(tq.kv_batch_get, ["a", "b"], "some"),
        attempt(tq.kv_batch_get, ["a", "b"], "some", ["x", "y"]),
        attempt(tq.kv_batch_get, ["a", "c"], "some"),
        attempt(tq.kv_batch_get, ["a", "b"], "some", ["y"]),
    ]


@case
def get_by_metadata() -> Any:
    with rows("meta", 3, x=torch.arange(3), y=torch.arange(3.0)) as keys:
        new = lambda **kwargs: tq.KVBatchMeta(keys=keys[1:], tags=[{}] * 2, **kwargs)  # noqa: E731
        return [
            attempt(tq.kv_batch_get_by_meta, new(partition_id="meta", fields=["x", "y"])),
            attempt(tq.kv_batch_get_by_meta, new(partition_id="meta", fields=["x"])),
            attempt(tq.kv_batch_get_by_meta, new(partition_id="meta")),
            attempt(tq.kv_batch_get_by_meta, new(partition_id="meta", fields=["x", "y"]), ["y"]),
            attempt(tq.kv_batch_get_by_meta, new(partition_id="meta", fields=["x"]), ["y"]),
            attempt(tq.kv_batch_get_by_meta, new(fields=["x"])),
        ]


@case
def kinds_of_columns() -> Any:
    columns = {
        "scalar": torch.arange(3), "one": torch.arange(3.0).view(3, 1), "uniform": torch.arange(6).view(3, 2),
        "deep": torch.arange(12).view(3, 2, 2), "flag": torch.tensor([True, False, True]),
        "half": torch.ones(3, 2).half(),
        "small": torch.ones(3, 2, dtype=torch.int8), "brain": torch.ones(3, dtype=torch.bfloat16),
        "ragged": jagged(torch.arange(1), torch.arange(3), torch.arange(0)),
        "second": jagged(torch.ones(2, 1), torch.ones(2, 3), torch.ones(2, 2)),
        "text": NonTensorStack("a", "bb", ""), "dicts": NonTensorStack({"a": 1}, {"b": [1, 2]}, {}),
        "lists": NonTensorStack([1], [], ["x", None]), "mixed": NonTensorStack(1, "two", None),
    }  # fmt: skip
    with rows("kinds", 3, **columns) as keys:
        return attempt(tq.kv_batch_get, keys, "kinds"), attempt(tq.kv_batch_get, keys[:1], "kinds")


@case
def one_value_for_all_rows() -> Any:
    fields = batch(2, x=torch.ones(2), s=NonTensorData("text"))
    return attempt(tq.kv_batch_put, keys=["a", "b"], partition_id="same", fields=fields)


@case
def rows_of_several_puts_in_one_column() -> Any:
    tq.kv_put("a", "puts", {"x": torch.ones(2), "v": torch.ones(2, 1), "o": "text"})
    tq.kv_put("b", "puts", {"x": torch.ones(3), "v": torch.ones(1, 3), "o": {"k": 1}})
    return attempt(tq.kv_batch_get, ["a", "b"], "puts")


@case
def dtypes_that_differ() -> Any:
    tq.kv_put("a", "dtype", {"x": torch.ones(2)})
    return (
        attempt(tq.kv_put, "b", "dtype", {"x": torch.ones(2, dtype=torch.int64)}),
        tq.kv_list("dtype"),
        [attempt(tq.kv_batch_get, keys, "dtype") for keys in ("a", ["a", "b"])],
    )


@case
def how_verl_reads_a_batch() -> Any:
    columns = {
        "ids": torch.arange(6).view(3, 2),
        "uid": NonTensorStack("a", "b", "c"),
        "turns": NonTensorStack(2, 3, 4),
    }
    with rows("verl", 3, **columns) as keys:
        td = tq.kv_batch_get(keys, "verl")
        first = td[0]
        listed = [list(td["uid"]), [getattr(value, "data", value) for value in td["turns"]]]
        popped = [td.pop("uid").tolist(), td.pop("turns").tolist()]
        padded = td.to_padded_tensor()
        return plain([listed, popped, td["ids"].offsets(), padded["ids"], first["ids"], first["uid"], list(td.keys())])


@case
def padding_of_ragged_rows() -> Any:
    with rows("pad", 3, x=jagged(torch.ones(2), torch.ones(5), torch.ones(1))) as keys:
        td = tq.kv_batch_get(keys, "pad")
        return plain([td["x"].to_padded_tensor(7.0), td.to_padded_tensor()["x"], td["x"].sum(dim=1)])


@case
def rows_stay_after_a_clear_and_may_be_written_to() -> Any:
    with rows("stay", 2, x=torch.arange(4.0).view(2, 2)) as keys:
        td = tq.kv_batch_get(keys, "stay")
    td["x"].values().add_(1)
    return plain(td["x"])


@case
def clearing() -> Any:
    tq.kv_batch_put(keys=["a", "b", "c"], partition_id="clear", fields=batch(3, x=torch.arange(3)))
    steps = [attempt(tq.kv_clear, keys, "clear") for keys in ("a", ["b", "unknown"], ["a"], [])]
    return (
        steps,
        tq.kv_list("clear"),
        attempt(tq.kv_clear, ["a"], "no such partition"),
        attempt(tq.kv_batch_get, ["a"], "clear"),
    )


@case
def listing() -> Any:
    tq.kv_put("k", "one", tag={"a": 1})
    tq.kv_put("k", "two", {"x": torch.ones(1)})
    everything = tq.kv_list()
    return tq.kv_list("one"), tq.kv_list("unknown"), {name: everything.get(name) for name in ("one", "two")}


@case
def a_listing_belongs_to_its_caller() -> Any:
    tq.kv_put("k", "own", tag={"a": {"b": 1}})
    tq.kv_list("own")["own"]["k"]["a"]["b"] = 2
    return tq.kv_list("own")


@case
def the_async_twins() -> Any:
    async def run() -> Any:
        put = await tq.async_kv_put(key="a", partition_id="async", fields={"x": torch.ones(2)}, tag={"s": 1})
        more = await tq.async_kv_batch_put(
            keys=["b"], partition_id="async", fields=batch(1, x=torch.ones(1, 2)), tags=[{}]
        )
        both = await asyncio.gather(*[tq.async_kv_batch_get(keys=[key], partition_id="async") for key in "ab"])
        by_meta = await tq.async_kv_batch_get_by_meta(more)
        listed = await tq.async_kv_list("async")
        await tq.async_kv_clear(keys=["a", "b"], partition_id="async")
        return put, more, both, by_meta, listed

    return attempt(lambda: asyncio.run(run()))


@case
def a_parser() -> Any:
    def parse(columns: dict[str, Any]) -> dict[str, Any]:
        return {"x": [value * 2 for value in columns["x"]]}

    meta = attempt(
        tq.kv_batch_put, keys=["a", "b"], partition_id="parse", fields=batch(2, x=torch.arange(2)), data_parser=parse
    )
    return meta, attempt(tq.kv_batch_get, ["a", "b"], "parse")


@case
def a_parser_that_drops_a_field() -> Any:
    fields = batch(1, x=torch.ones(1))
    return attempt(tq.kv_batch_put, keys=["a"], partition_id="drop", fields=fields, data_parser=lambda columns: {})
