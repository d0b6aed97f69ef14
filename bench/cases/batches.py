"""Dense batches: put, get, publish, gather; cases 1, 2, 3, 6 and 7."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from bench.fleet import Pair
from bench.result import Row, Samples, spread
from bench.rounds import Bench, Body, Prepare

LONG_S = 120.0
GETS = 6
COMMITS = 3
"""Gets, and commits, in one turn; gets for systems that are quick enough."""
FIELD_COUNTS = (1, 8, 32, 64)
Spec = dict[str, Any]


def dense_spec(fields: int, width: int, rows: int = 1024) -> Spec:
    return {"kind": "dense", "rows": rows, "fields": fields, "width": width}


def dense_nbytes(spec: Spec) -> int:
    return int(spec["rows"] * spec["fields"] * spec["width"] * 4)


def loader(spec: Spec) -> Prepare:
    """Let the writer hold the batch and the reader its sums."""

    def prepare(pair: Pair, system: str) -> None:
        del system
        loading, expecting = pair.writer.send("bulk.load", spec=spec), pair.reader.send("bulk.expect", spec=spec)
        pair.writer.receive(loading, LONG_S)
        pair.reader.receive(expecting, LONG_S)

    return prepare


def cycle(spec: Spec, *, puts: int = 1, copies: bool = True, by_meta: bool = False) -> Body:
    """`puts` puts, some gets of the first of them, a get with a copy where the system has both, and the clears.

    Metrics in seconds: put, get, get_idle (the first, in a process that was idle), read (summing what was got),
    get_copy, get_meta_copy, clear.
    """

    def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
        where: dict[str, Any] = {"spec": spec, "partition": f"batch-{number}"}
        put = pair.writer.call("bulk.put", LONG_S, times=puts, **where)
        got = pair.reader.call("bulk.get", LONG_S, times=GETS, **where)
        metrics = {"put": put["each_s"], "get": got["each_s"], "get_idle": got["idle_s"], "read": got["read_s"]}
        if copies and system != "tq":
            copied = pair.reader.call("bulk.get", LONG_S, copy=True, times=puts + 1, **where)
            metrics |= {"get_copy": copied["each_s"], "read_copy": copied["read_s"]}
        if by_meta and system == "ours":
            metrics["get_meta_copy"] = pair.reader.call("bulk.get_by_meta", LONG_S, **where)["s"]
        metrics["clear"] = pair.writer.call("bulk.clear", LONG_S, times=puts, **where)["each_s"]
        return metrics

    return body


def get_row(samples: Samples, case: int, what: str) -> Row:
    """The row of the default get, with what it costs a process that was idle before."""
    row = samples.row(case, f"{what}: get", "get")
    idle = samples.quantile("ours", "get_idle")
    if idle is not None:
        row.notes.append(f"ours: {idle * 1e3:.2f} ms when the reader was idle before, with cold caches")
    return row


def dense(bench: Bench) -> list[Row]:
    """Case 1: 1024 x 9 x 8192 float32."""
    spec = dense_spec(9, 8192)
    samples = bench.rounds(cycle(spec, by_meta=True), prepare=loader(spec), memcpy_nbytes=dense_nbytes(spec), warm_up=3)
    get = get_row(samples, 1, "dense 302 MB").at_most("<= 1 ms", 1e-3)
    for system in get.values:
        view, copy = samples.quantile(system, "read"), samples.quantile(system, "read_copy")
        if view is not None:
            beside = f", {copy * 1e3:.0f} ms after a copy" if copy is not None else ""
            get.notes.append(f"{system}: summing every byte afterwards {view * 1e3:.0f} ms{beside}")
    put = samples.row(1, "dense 302 MB: put", "put").of_memcpy(0.8).faster_than("tq", 8).faster_than("ray", 1)
    firsts = (f"{system} {first['put'][0] * 1e3:.0f} ms" for system, first in samples.first.items() if "put" in first)
    put.notes.append("the first of all, into memory that was never touched: " + ", ".join(firsts))
    return [
        put,
        get,
        samples.row(1, "dense 302 MB: get copy=True", "get_copy", tq="get").of_memcpy(0.8),
        samples.row(1, "dense 302 MB: get_data copy=True", "get_meta_copy", tq="get", ray="get_copy").of_memcpy(0.8),
        samples.row(1, "dense 302 MB: clear", "clear"),
    ]


def publish(bench: Bench) -> list[Row]:
    """Case 2: commit of tensors that were written in place; ours only, as the peers have nothing like it."""
    rows = []
    for spec in (dense_spec(9, 256), dense_spec(9, 8192)):

        def body(pair: Pair, system: str, number: int, spec: Spec = spec) -> dict[str, Any]:
            del system
            where: dict[str, Any] = {"spec": spec, "partition": f"publish-{number}"}
            written = pair.writer.call("bulk.allocate_and_commit", LONG_S, times=COMMITS, **where)
            pair.reader.call("bulk.get", LONG_S, **where)
            pair.writer.call("bulk.clear", LONG_S, times=COMMITS, **where)
            return {"commit": written["each_s"], "fill": written["fill_s"]}

        nbytes = dense_nbytes(spec)
        samples = bench.rounds(body, systems=["ours"], prepare=loader(spec), memcpy_nbytes=nbytes)
        row = samples.row(2, f"publish of allocated {nbytes / 1e6:.0f} MB", "commit").at_most("<= 1 ms", 1e-3)
        if (fill := samples.quantile("ours", "fill")) is not None:
            row.notes.append(f"writing into the allocated tensors {fill * 1e3:.1f} ms")
        rows.append(row)
    return rows


def field_counts(bench: Bench) -> list[Row]:
    """Case 3: the same bytes in 1, 8, 32 and 64 fields, all of them in every round, so that drift can't pass for slope.

    TransferQueue gets three rounds, to keep the run short.
    """
    specs = {fields: dense_spec(fields, 73728 // fields) for fields in FIELD_COUNTS}
    cycles = {fields: cycle(spec) for fields, spec in specs.items()}

    def prepare(pair: Pair, system: str) -> None:
        for spec in specs.values():
            loader(spec)(pair, system)

    def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
        if system == "tq" and number not in range(3):
            return {}
        return {
            f"{metric}_{fields}": value
            for fields, one in cycles.items()
            for metric, value in one(pair, system, number).items()
        }

    samples = bench.rounds(body, prepare=prepare, memcpy_nbytes=dense_nbytes(specs[1]), warm_up=2)
    rows: list[Row] = []
    for metric, label in (("put", "put"), ("get", "get"), ("get_copy", "get copy=True")):
        for fields in FIELD_COUNTS:
            peer = f"{metric.replace('_copy', '')}_{fields}"
            rows.append(samples.row(3, f"302 MB in {fields} fields: {label}", f"{metric}_{fields}", tq=peer))
        rows.append(flatness(3, f"302 MB in 1 to 64 fields: {label}", rows[-len(FIELD_COUNTS) :], 1.3))
        if metric == "get":
            rows[-1].notes.append("a NestedTensor, of which there is one a field, costs 12 to 45 us whatever its size")
    return rows


def flatness(case: int, what: str, rows: Sequence[Row], bound: float) -> Row:
    """The slowest of these rows over the fastest."""
    row = Row(case=case, what=f"{what}, slowest / fastest", unit="x")
    factor = spread([one.values["ours"] for one in rows if "ours" in one.values])
    if factor is None:
        row.failures["ours"] = "not measured"
    else:
        row.values["ours"] = factor
    return row.at_most(f"<= {bound:g}", bound)


def random_rows(bench: Bench) -> list[Row]:
    """Case 6: 256 rows of the 302 MB, other ones in every round."""
    spec, num = dense_spec(9, 8192), 256
    load = loader(spec)

    def prepare(pair: Pair, system: str) -> None:
        load(pair, system)
        pair.writer.call("bulk.put", LONG_S, spec=spec, partition="gather")

    def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
        del system
        positions = random.Random(number).sample(range(spec["rows"]), num)
        where: dict[str, Any] = {"spec": spec, "partition": "gather", "positions": positions}
        return {"get": pair.reader.call("bulk.get", LONG_S, times=3, **where)["each_s"]}

    nbytes = dense_nbytes(spec) * num // spec["rows"]
    samples = bench.rounds(body, prepare=prepare, memcpy_nbytes=nbytes, cleanup=clear_batch(spec, "gather"))
    return [samples.row(6, "256 random rows of 1024 (75 MB): get", "get").faster_than("tq", 10)]


def clear_batch(spec: Spec, partition: str) -> Prepare:
    """Clear what `prepare` put."""

    def cleanup(pair: Pair, system: str) -> None:
        del system
        pair.writer.call("bulk.clear", LONG_S, spec=spec, partition=partition)

    return cleanup


def nine_megabytes(bench: Bench) -> list[Row]:
    """Case 7: 1024 x 9 x 256 float32."""
    spec = dense_spec(9, 256)
    samples = bench.rounds(cycle(spec, puts=3), prepare=loader(spec), memcpy_nbytes=dense_nbytes(spec), warm_up=2)
    return [
        samples.row(7, "dense 9 MB: put", "put").faster_than("tq", 5),
        get_row(samples, 7, "dense 9 MB").faster_than("tq", 20),
        samples.row(7, "dense 9 MB: get copy=True", "get_copy", tq="get"),
    ]
