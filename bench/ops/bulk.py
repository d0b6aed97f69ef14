"""Whole batches: put, get, check, clear; and the memory copy that they are compared with."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from bench import digest, payloads
from bench.session import Session, spec_name

Spec = dict[str, Any]
TURN_S = 0.25
"""A turn of several calls ends early after this long."""


def size(session: Session, spec: Spec) -> dict[str, Any]:
    """Bytes of a batch."""
    del session
    return {"nbytes": payloads.nbytes(payloads.build(spec))}


def load(session: Session, spec: Spec) -> dict[str, Any]:
    """Build a batch and keep it in the system's own form, for `put`."""
    columns = payloads.build(spec)
    session.payloads[spec_name(spec)] = session.system.batch(columns)
    return {"nbytes": payloads.nbytes(columns), "rows": payloads.num_rows(columns)}


def expect(session: Session, spec: Spec) -> dict[str, Any]:
    """Build the same batch at the reader and keep only its sums, for the check after `get`."""
    session.expected[spec_name(spec)] = digest.of_payload(payloads.build(spec))
    gc.collect()
    return {}


def forget(session: Session) -> dict[str, Any]:
    """Let go of every batch, sum and result."""
    for kept in (session.payloads, session.expected, session.scratch):
        kept.clear()
    gc.collect()
    return {}


def put(session: Session, spec: Spec, partition: str, times: int = 1) -> dict[str, Any]:
    """Seconds of each put of the whole batch, into `partition`, `partition`.1 and so on."""
    batch, keys = session.payloads[spec_name(spec)], session.keys(spec["rows"])
    names = batch_names(partition, times)
    seconds = []
    for name in names:
        start = time.perf_counter()
        session.system.put(name, keys, batch)
        seconds.append(time.perf_counter() - start)
    for name in names:
        session.system.publish(name)
    gc.collect()
    return {"each_s": seconds}


def batch_names(partition: str, times: int) -> list[str]:
    """Partitions that `put` writes."""
    return [partition, *(f"{partition}.{i}" for i in range(1, times))]


def get(
    session: Session,
    spec: Spec,
    partition: str,
    positions: list[int] | None = None,
    copy: bool = False,
    hold: bool = False,
    times: int = 1,
    pause_s: float = 0.03,
) -> dict[str, Any]:
    """Seconds of each get, by key, of the batch or of the rows at `positions`; raises WrongBytes when sums differ.

    The first get finds the process idle and its caches cold: it is `idle_s`. Where `times` is more than 1 another one
    follows however long the first took, and up to `times` - 2 more within a quarter of a second, each after a pause, in
    which the system can tidy up the result dropped before, and an untimed get of one row, as in a process at work: they
    are `each_s`.

    The last result is summed: `read_s` is what that took, as a view costs its page faults there. It is dropped too,
    unless `hold`. Garbage is collected after the clock stops, never just before it starts.
    """
    keys = session.keys(spec["rows"], positions)
    session.system.locate(partition)
    seconds: list[float] = []
    result: Any = None
    while len(seconds) < min(times, 2) or (len(seconds) < times and sum(seconds) < TURN_S):
        result = None
        if seconds:
            time.sleep(pause_s)
            session.system.get(partition, keys[:1], [0], False)
        start = time.perf_counter()
        result = session.system.get(partition, keys, positions, copy)
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    digest.check(session.system.sums(result), session.expected[spec_name(spec)], positions)
    read_s = time.perf_counter() - start
    if hold:
        session.scratch["held"] = result
    del result
    session.system.leave(partition)
    gc.collect()
    return {"idle_s": seconds[0], "each_s": seconds[1:] or seconds, "read_s": read_s}


def get_by_meta(session: Session, spec: Spec, partition: str) -> dict[str, Any]:
    """Seconds of `client.get_data(meta, copy=True)` of the whole batch (ours only)."""
    client = session.tq.get_client()
    meta = client.kv_retrieve_meta(session.keys(spec["rows"]), partition)
    start = time.perf_counter()
    result = client.get_data(meta, copy=True)
    seconds = time.perf_counter() - start
    digest.check(session.system.sums(result), session.expected[spec_name(spec)])
    return {"s": seconds}


def drop(session: Session) -> dict[str, Any]:
    """Let go of a result that `get` was asked to hold."""
    session.scratch.pop("held", None)
    gc.collect()
    return {}


def clear(session: Session, spec: Spec, partition: str, times: int = 1) -> dict[str, Any]:
    """Seconds of each clearing of the batch's keys, in the partitions that `put` wrote."""
    keys = session.keys(spec["rows"])
    seconds = []
    for name in batch_names(partition, times):
        start = time.perf_counter()
        session.system.clear(name, keys)
        seconds.append(time.perf_counter() - start)
    return {"each_s": seconds}


def allocate_and_commit(session: Session, spec: Spec, partition: str, times: int) -> dict[str, Any]:
    """Seconds of publishing a batch that was written into allocated tensors (ours only); `fill_s` is the writing.

    Each of the `times` batches goes to a partition of its own, as with `put`.
    """
    import torch

    client = session.tq.get_client()
    batch, keys = session.payloads[spec_name(spec)], session.keys(spec["rows"])
    shape = (spec["rows"], spec["width"])
    filling, committing = [], []
    for name in batch_names(partition, times):
        alloc = client.allocate({f"f{i}": (shape, torch.float32) for i in range(spec["fields"])})
        start = time.perf_counter()
        for i in range(spec["fields"]):
            alloc[f"f{i}"].copy_(batch[f"f{i}"])
        filling.append(time.perf_counter() - start)
        start = time.perf_counter()
        alloc.commit(partition_id=name, keys=keys)
        committing.append(time.perf_counter() - start)
    del alloc
    gc.collect()
    return {"each_s": committing, "fill_s": filling}


def memcpy(session: Session, nbytes: int) -> dict[str, Any]:
    """Seconds of a single-thread copy of `nbytes` between two buffers that were touched before."""
    source, target = session.scratch.get("memcpy", (None, None))
    if source is None or len(source) < nbytes:
        source, target = np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)
        np.copyto(target, source)
        session.scratch["memcpy"] = (source, target)
    start = time.perf_counter()
    np.copyto(target[:nbytes], source[:nbytes])
    return {"s": time.perf_counter() - start}


def object_floor(session: Session, spec: Spec) -> dict[str, Any]:
    """Seconds of building the batch's object columns as NonTensorStacks, which every get of them has to do."""
    from bench.systems import torch_column

    del session
    columns = [c for c in payloads.build(spec).values() if isinstance(c, payloads.Objects)]
    gc.collect()
    start = time.perf_counter()
    for column in columns:
        torch_column(column)
    return {"s": time.perf_counter() - start, "columns": len(columns)}


def put_lists(session: Session, spec: Spec, partition: str) -> dict[str, Any]:
    """Seconds of putting plain Python lists; for TransferQueue 0.1.11, that takes no lists, with their conversion."""
    tq = session.tq
    name = spec_name(spec) + " lists"
    if name not in session.payloads:
        session.payloads[name] = payloads.as_lists(payloads.build(spec))
    lists = session.payloads[name]
    start = time.perf_counter()
    batch = lists if session.name == "ours" else tensors_of(lists, spec["rows"])
    tq.get_client().put(batch, partition_id=partition)
    return {"s": time.perf_counter() - start}


def tensors_of(lists: dict[str, list[Any]], rows: int) -> Any:
    """A TensorDict of columns given as lists, by NumPy, which reads lists several times as fast as torch does."""
    import torch
    from tensordict import TensorDict

    columns = {}
    for name, column in lists.items():
        if isinstance(column[0], list):
            arrays = [np.array(row, dtype_of(row)) for row in column]
            offsets = np.cumsum([0, *(len(row) for row in arrays)])
            values = torch.from_numpy(np.concatenate(arrays))
            columns[name] = torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(offsets))
        else:
            columns[name] = torch.from_numpy(np.array(column, dtype_of(column)))
    return TensorDict(columns, batch_size=rows)


def dtype_of(numbers: list[Any]) -> Any:
    """What torch makes of them."""
    return np.float32 if numbers and isinstance(numbers[0], float) else None


def get_lists(session: Session, spec: Spec, partition: str, task: str) -> dict[str, Any]:
    """Fetch what `put_lists` stored and check it against the lists by value, whatever form it has now."""
    name = spec_name(spec) + " lists"
    if name not in session.payloads:
        session.payloads[name] = payloads.as_lists(payloads.build(spec))
    lists = session.payloads[name]
    client = session.tq.get_client()
    meta = client.get_meta(sorted(lists), spec["rows"], partition, task_name=task)
    start = time.perf_counter()
    result = client.get_data(meta)
    seconds = time.perf_counter() - start
    for field, column in lists.items():
        got, wanted = value_sum(result[field]), sum(sum(row) if isinstance(row, list) else row for row in column)
        if abs(got - wanted) > 1e-4 * max(1.0, abs(wanted)):
            raise digest.WrongBytes(f"{field}: values sum to {got}, {wanted} were put")
    client.clear_partition(partition)
    return {"s": seconds}


def value_sum(column: Any) -> float:
    """Sum of a column's numbers, exact for integers."""
    import torch

    if isinstance(column, torch.Tensor):
        values = column.values() if column.is_nested else column
        return float(values.sum(dtype=torch.float64))
    return float(sum(sum(row) if isinstance(row, list) else float(row) for row in column.tolist()))
