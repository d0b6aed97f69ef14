"""What the service holds of a program, as a client sees it: to tell what a refused call has left behind."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from outcomes import Names, plain

import transfer_queue as tq

FIELDS = ("a", "b", "c", "d")
TASKS = ("t", "u")
Held = dict[str, Any]  # what -> how it is; only ever compared with what the same package held before


def held(names: Names) -> Held:
    """Partitions, keys and tags, rows, which cells are there, their values, and what each task has used."""
    found: Held = {"partitions": _of_program(names, tq.get_client().get_partition_list())}
    for partition in found["partitions"]:
        found |= _in_partition(names, partition)
    return found


def changed(before: Held, after: Held) -> list[str]:
    """Which of it is not as it was; empty where nothing was left behind."""
    there = {what for what in before.keys() | after.keys() if before.get(what) != after.get(what)}
    return sorted({what.partition(" in ")[0] for what in there})


def _of_program(names: Names, partitions: list[str]) -> list[str]:
    return sorted(one for one in partitions if one.startswith(names.prefix))


def _in_partition(names: Names, partition: str) -> Held:
    client = tq.get_client()
    found: Held = {f"keys in {partition}": plain(tq.kv_list(partition_id=partition), names)}
    for task in TASKS:
        indexes, used = client.get_consumption_status(task_name=task, partition_id=partition)
        found[f"use in {partition} by {task}"] = None if used is None else [indexes.tolist(), used.tolist()]
    for field in FIELDS:
        given = {"data_fields": [field], "batch_size": 1, "partition_id": partition, "mode": "force_fetch"}
        with suppress(Exception):  # nothing has the field, or no row is there
            meta = client.get_meta(**given)
            meta.reorder(sorted(range(len(meta)), key=meta.global_indexes.__getitem__))
            found[f"rows in {partition}"] = list(meta.global_indexes)
            found[f"tags in {partition}"] = plain(list(meta.custom_meta), names)
            ready = np.flatnonzero(np.asarray(meta.production_status)).tolist()
            found[f"cells in {partition} of {field}"] = ready
            found[f"values in {partition} of {field}"] = _values(meta.select_samples(ready), names)
    return found


def _values(meta: tq.BatchMeta, names: Names) -> Any:
    """Row by row: what lies in a field together may be refused, or be made one dtype."""
    client, found = tq.get_client(), []
    for at in range(len(meta)):
        row = client.get_data(meta.select_samples([at]))
        found.append({name: plain(row.get(name), names) for name in row.keys()})  # noqa: SIM118  no mapping
    return found
