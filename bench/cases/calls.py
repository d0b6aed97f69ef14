"""Small operations: one row, metadata, listings, waking; cases 8, 9 and 10."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.cases.batches import LONG_S, flatness
from bench.fleet import Pair
from bench.result import Row, Samples
from bench.rounds import Bench, Prepare

IN_FLIGHT = 16
META_ROWS = 8
LISTED = 100_000


def one_row(bench: Bench) -> list[Row]:
    """Case 8: three small fields, one after another and 16 at once."""

    def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
        where: dict[str, Any] = {"partition": f"rows-{number}", "num": 50 if system == "tq" else 250}
        metrics = {"put": pair.writer.call("calls.put_rows", **where)["each_s"]}
        metrics["get"] = pair.reader.call("calls.get_rows", **where)["each_s"]
        pair.writer.call("calls.clear_keys", **where)
        if system != "ray":
            where |= {"partition": f"async-{number}", "num": 320 if system == "tq" else 3000, "in_flight": IN_FLIGHT}
            metrics["async_put"] = pair.writer.call("calls.async_rows", write=True, **where)["ops_per_s"]
            metrics["async_get"] = pair.reader.call("calls.async_rows", write=False, **where)["ops_per_s"]
            del where["in_flight"]
            pair.writer.call("calls.clear_keys", **where)
        return metrics

    samples = bench.rounds(body)
    return [
        samples.row(8, "one-row kv_put, 3 fields: p50", "put").at_most("<= 120 us", 120e-6),
        samples.row(8, "one-row kv_batch_get: p50", "get").at_most("<= 150 us", 150e-6),
        samples.row(8, "16 in flight, async_kv_put", "async_put", unit="ops/s").at_least(">= 10 k/s", 10e3),
        samples.row(8, "16 in flight, async_kv_batch_get", "async_get", unit="ops/s").at_least(">= 10 k/s", 10e3),
    ]


def metadata(bench: Bench) -> list[Row]:
    """Case 9: fetching 8 rows' metadata out of ever larger partitions, and what lists a partition."""
    sizes = [1_000, LISTED] if bench.options.quick else [1_000, LISTED, 1_000_000]
    samples = fetches(bench, sizes)
    rows = []
    for size in sizes:
        row = samples.row(9, f"get_meta of 8 rows, {size:,} in the partition: p50", f"get_meta_{size}")
        if (first := samples.quantile("ours", f"first_{size}")) is not None:
            row.notes.append(f"ours: the first fetch of a new task {first * 1e3:.2f} ms")
        rows.append(row.at_most("<= 0.3 ms", 0.3e-3))
    rows.append(flatness(9, "get_meta of 8 rows", rows, 1.5))
    plain, tagged = listings(bench, tagged=False), listings(bench, tagged=True)
    labels = {"consumption": "get_consumption_status", "production": "get_production_status", "kv_list": "kv_list"}
    rows += [plain.row(9, f"{label}, 100 k rows", metric).faster_than("tq", 20) for metric, label in labels.items()]
    rows.append(tagged.row(9, "kv_list, 100 k rows with tags", "kv_list").faster_than("tq", 20))
    return [*rows, tagged.row(9, "kv_list, 100 k rows with tags, and reading every tag", "kv_list_read")]


def fetches(bench: Bench, sizes: Sequence[int]) -> Samples:
    """Fetches of 8 rows at every partition size, all sizes and a new task in every round."""

    def prepare(pair: Pair, system: str) -> None:
        del system
        for size in sizes:
            pair.writer.call("calls.fill", LONG_S, partition=f"meta-{size}", num=size, keyed=False)

    def cleanup(pair: Pair, system: str) -> None:
        for size in sizes:
            clear_partition(f"meta-{size}")(pair, system)

    def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        for size in sizes:
            num_ops = 100 if system == "ours" else max(3, min(50, 1_000_000 // size))
            where = {"partition": f"meta-{size}", "num_ops": num_ops, "rows": META_ROWS, "task": f"task-{number}"}
            answer = pair.reader.call("calls.get_meta", LONG_S, **where)
            metrics |= {f"get_meta_{size}": answer["each_s"], f"first_{size}": answer["first_s"]}
        return metrics

    return bench.rounds(body, systems=["ours", "tq"], prepare=prepare, cleanup=cleanup)


def listings(bench: Bench, tagged: bool) -> Samples:
    """Statuses and kv_list of a keyed partition."""
    partition = "tagged" if tagged else "listed"

    def prepare(pair: Pair, system: str) -> None:
        del system
        where: dict[str, Any] = {"partition": partition, "num": LISTED, "keyed": True, "tagged": tagged}
        pair.writer.call("calls.fill", LONG_S, **where)

    def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
        del system, number
        return pair.reader.call("calls.listings", LONG_S, partition=partition, num=LISTED, tagged=tagged)

    return bench.rounds(body, systems=["ours", "tq"], prepare=prepare, cleanup=clear_partition(partition))


def clear_partition(partition: str) -> Prepare:
    """Clear what `prepare` filled."""

    def cleanup(pair: Pair, system: str) -> None:
        del system
        pair.writer.call("calls.clear_partition", LONG_S, partition=partition)

    return cleanup


def waking(bench: Bench) -> list[Row]:
    """Case 10: from before the call that writes the last field to the moment that a blocked reader holds the data."""

    def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
        where: dict[str, Any] = {"partition": f"wake-{number}", "num": 60 if system == "ours" else 20}
        pair.writer.call("calls.wake_prepare", **where)
        waiting = pair.reader.send("calls.wake_wait", deadline_s=30.0, **where)
        written = pair.writer.call("calls.wake_write", pace_s=0.01, **where)
        held = pair.reader.receive(waiting, 40.0)["held_ns"]
        pair.writer.call("calls.clear_partition", partition=where["partition"])
        return {
            "begun": [(h - b) / 1e9 for h, b in zip(held, written["begun_ns"], strict=True)],
            "done": [(h - d) / 1e9 for h, d in zip(held, written["done_ns"], strict=True)],
        }

    samples = bench.rounds(body, systems=["ours", "tq"])
    p50 = samples.row(10, "last field's put begins -> consumer holds data: p50", "begun").at_most("<= 1 ms", 1e-3)
    if (done := samples.quantile("ours", "done")) is not None:
        p50.notes.append(f"ours, counted from the return of that put: p50 {done * 1e6:.0f} us")
    p50.notes.append("TransferQueue 0.1.11 can't wait: its consumer polls every millisecond")
    p99 = samples.row(10, "last field's put begins -> consumer holds data: p99", "begun", share=0.99)
    return [p50, p99.at_most("<= 5 ms", 5e-3)]
