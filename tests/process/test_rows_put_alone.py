"""Rows that were put alone, read many at once through a service."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from blocks import rows_of, same

import transfer_queue as tq

P = "train"


def put_alone(partition: str, count: int, steps: int = 1) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for number in range(count):
        steps_here = torch.arange(number % 7 * steps)
        row = {"x": steps_here, "y": torch.full((2,), float(number)), "s": f"text {number}", "o": [number, "a"]}
        rows[f"{partition} {number}"] = row
    for key, row in rows.items():
        tq.kv_put(key, partition, fields=row)
    return rows


def is_what_was_put(found: Any, keys: list[str], rows: dict[str, dict[str, Any]], fields: list[str]) -> None:
    for name in fields:
        for key, value in zip(keys, rows_of(found[name]), strict=True):
            assert same(value, rows[key][name]), (key, name)


@pytest.mark.parametrize("steps", [1, 1000], ids=["in the message", "in shared memory"])
def test_rows_that_were_put_alone_are_read_in_any_order(shared: Any, steps: int) -> None:
    rows = put_alone(P, 40, steps)
    keys = random.Random(1).choices(sorted(rows), k=60)
    is_what_was_put(tq.kv_batch_get(keys=keys, partition_id=P), keys, rows, ["x", "y", "s", "o"])
    dense = torch.empty(60, 2)
    meta = tq.get_client().kv_retrieve_meta(keys, P)
    tq.get_client().get_data(meta.select_fields(["y"]), out={"y": dense})
    assert dense[:, 0].tolist() == [float(key.split()[1]) for key in keys]


def test_fields_that_came_later_and_rows_of_another_kind_are_read_with_them(shared: Any) -> None:
    rows = put_alone("mixed", 30)
    for number, (key, row) in enumerate(rows.items()):
        row["r"] = torch.tensor(float(number))
        if number % 3:
            row["s"] = {"number": number}
        tq.kv_put(key, "mixed", fields={name: row[name] for name in ("r", "s")})
    keys = random.Random(2).sample(sorted(rows), 30)
    is_what_was_put(tq.kv_batch_get(keys=keys, partition_id="mixed"), keys, rows, ["x", "y", "s", "o", "r"])


def test_what_was_read_stays_when_the_rows_are_cleared(shared: Any) -> None:
    rows = put_alone("gone", 20)
    keys = sorted(rows)
    found = tq.kv_batch_get(keys=keys, partition_id="gone")
    tq.kv_clear(keys, "gone")
    put_alone("other", 20)
    is_what_was_put(found, keys, rows, ["x", "y", "s", "o"])
