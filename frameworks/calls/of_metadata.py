"""The methods of `BatchMeta` and `KVBatchMeta`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from cases import attempt, batch, case, plain

import transfer_queue as tq


def by_row(count: int = 5, partition: str = "metadata") -> tq.BatchMeta:
    """Fresh rows, with tags and extra_info."""
    meta = tq.get_client().put(batch(count, x=torch.arange(count), y=torch.ones(count, 2)), partition_id=partition)
    meta.update_custom_meta([{"n": number} for number in range(count)])
    meta.set_extra_info("seed", 3)
    return meta


def by_key(count: int = 5, first: int = 0, **kwargs: Any) -> tq.KVBatchMeta:
    keys = [f"k{number}" for number in range(first, first + count)]
    chosen = {"partition_id": "p", "fields": ["x", "y"], "extra_info": {"seed": 3}, **kwargs}
    return tq.KVBatchMeta(keys=keys, tags=[{"n": number} for number in range(count)], **chosen)


def afterwards(value: Any, change: Callable[[Any], Any]) -> Any:
    """What a change returned or raised, and the changed value."""
    return attempt(change, value), plain(value)


@case
def choosing_rows() -> Any:
    meta = by_row()
    chosen = [attempt(meta.select_samples, part) for part in ([3, 1], [0, 0], [], [5], [-1])]
    items = [attempt(lambda at=at: meta[at]) for at in (0, -1, slice(1, 4, 2), slice(0, 0), [1], 9)]
    return chosen, items, len(meta), bool(tq.BatchMeta.empty())


@case
def choosing_fields() -> Any:
    meta = by_row()
    return [attempt(meta.select_fields, names) for names in (["y"], ["y", "unknown"], ["unknown"], [])]


@case
def chunks() -> Any:
    meta = by_row()
    return [attempt(meta.chunk, count) for count in (2, 3, 7, 0, -1)]


@case
def chunks_by_partition() -> Any:
    both = tq.BatchMeta.concat([by_row(2, "first"), by_row(1, "second"), by_row(1, "first")])
    return plain(both), attempt(both.chunk_by_partition)


@case
def concatenation() -> Any:
    one, other = by_row(2), by_row(1)
    clash = by_row(1)
    clash.set_extra_info("seed", 4)
    other.set_extra_info("more", [1])
    joined = tq.BatchMeta.concat([one, tq.BatchMeta.empty(), other])
    fields = one.select_fields(["x"])
    return [
        plain(joined),
        joined.get_all_extra_info(),
        attempt(tq.BatchMeta.concat, [one, clash]),
        attempt(tq.BatchMeta.concat, [one, fields]),
        attempt(tq.BatchMeta.concat, []),
        attempt(tq.BatchMeta.concat, [one, one]),
    ]


@case
def union_of_fields() -> Any:
    meta = by_row(2)
    x, y = meta.select_fields(["x"]), meta.select_fields(["y"])
    return [attempt(x.union, y), attempt(x.union, tq.BatchMeta.empty()), attempt(x.union, by_row(2)), plain(x)]


@case
def order_of_rows() -> Any:
    changes = [[2, 0, 1], [0, 1], [0, 0, 1], [0, 1, 3]]
    return [afterwards(by_row(3), lambda meta, order=order: meta.reorder(order)) for order in changes]


@case
def further_fields() -> Any:
    more = batch(2, z=torch.ones(2, 3))
    return [
        afterwards(by_row(2), lambda meta: meta.add_fields(more)),
        afterwards(by_row(2), lambda meta: meta.add_fields(more, set_all_ready=False)),
        afterwards(by_row(3), lambda meta: meta.add_fields(more)),
    ]


@case
def extra_info() -> Any:
    meta = by_row(1)
    found = [
        meta.get_extra_info("seed"),
        meta.get_extra_info("none"),
        meta.get_extra_info("none", 7),
        meta.has_extra_info("seed"),
    ]
    meta.update_extra_info({"a": [1], "seed": 5})
    meta.get_all_extra_info()["a"].append(2)
    removed = meta.remove_extra_info("seed")
    left = dict(meta.extra_info)
    meta.clear_extra_info()
    return found, removed, left, dict(meta.extra_info)


@case
def tags_of_rows() -> Any:
    changes = [[{"m": 1}, {}], [{"n": 9}], None, []]
    return [afterwards(by_row(2), lambda meta, tags=tags: meta.update_custom_meta(tags)) for tags in changes]


@case
def rows_one_by_one() -> Any:
    meta = by_row(2)
    return len(meta.samples), meta.samples[1].global_index == meta.global_indexes[1], meta.samples[0].partition_id


@case
def copies_and_pickles() -> Any:
    meta, keys = by_row(2), by_key()
    copied = meta.copy()
    copied.set_extra_info("seed", 0)
    return [
        plain(value) for value in (pickle.loads(pickle.dumps(meta)), pickle.loads(pickle.dumps(keys)))
    ], meta.extra_info


@case
def key_metadata() -> Any:
    new = tq.KVBatchMeta
    return [
        attempt(new, keys=["a", "a"], tags=[{}, {}]),
        attempt(new, keys=["a"], tags=[]),
        attempt(new),
        attempt(new, keys=["a"], tags=[{}], fields=["x", "x"]),
        attempt(new, keys=["a"], tags=[{}]),
        len(by_key()),
    ]


@case
def key_metadata_in_parts() -> Any:
    meta = by_key()
    return [
        attempt(meta.select_keys, ["k3", "k0"]),
        attempt(meta.select_keys, ["k0", "k0"]),
        attempt(meta.select_keys, ["none"]),
        attempt(meta.chunk, 2),
        attempt(meta.chunk, 7),
        attempt(meta.chunk, 0),
    ]


@case
def key_metadata_in_another_order() -> Any:
    changes = [[4, 3, 2, 1, 0], [0, 1], [0, 0, 1, 2, 3], [0, 1, 2, 3, 9], [-1, 0, 1, 2, 3]]
    return [afterwards(by_key(), lambda meta, order=order: meta.reorder(order)) for order in changes]


@case
def key_metadata_joined() -> Any:
    join = tq.KVBatchMeta.concat
    return [
        attempt(join, [by_key(2), by_key(2, 2)]),
        attempt(join, []),
        attempt(join, [by_key(2), by_key(2)]),
        attempt(join, [by_key(2), by_key(2, 2, partition_id="q")]),
        attempt(join, [by_key(2), by_key(2, 2, fields=["x"])]),
        attempt(join, [by_key(2), by_key(2, 2, extra_info={"seed": 4})]),
        attempt(join, [by_key(2, extra_info={}), by_key(2, 2, extra_info={})]),
        attempt(join, [by_key(2, fields=None), by_key(2, 2)]),
        attempt(join, [by_key(2), by_key(2, 2, fields=None)]),
    ]


@case
def key_metadata_owns_its_tags() -> Any:
    tags = [{"deep": {"a": 1}}]
    meta = tq.KVBatchMeta(keys=["k"], tags=tags)
    tags[0]["deep"]["a"] = 2
    return meta.tags
