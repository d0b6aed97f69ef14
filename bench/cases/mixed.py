"""Batches of mixed columns: complex, images, Python lists; cases 4, 5 and 13."""

from __future__ import annotations

import statistics
from typing import Any

from bench.cases.batches import LONG_S, cycle, get_row, loader
from bench.fleet import Pair
from bench.result import Row
from bench.rounds import Bench

COMPLEX = {"kind": "complex", "rows": 1024, "seq": 2048}
IMAGES = {"kind": "images", "rows": 32}
TOKENS = {"kind": "tokens", "rows": 256}


def complex_batch(bench: Bench) -> list[Row]:
    """Case 4: TransferQueue's own perftest shape, a third dense, a third ragged, a third strings, and dicts."""
    plain = bench.fleet.plain()
    nbytes = plain.call("bulk.size", LONG_S, spec=COMPLEX)["nbytes"]
    floors = [plain.call("bulk.object_floor", LONG_S, spec=COMPLEX) for _ in range(3)]
    floor = statistics.median(one["s"] for one in floors)
    samples = bench.rounds(cycle(COMPLEX), prepare=loader(COMPLEX), memcpy_nbytes=nbytes)
    what = f"complex {nbytes / 1e6:.0f} MB"
    get = get_row(samples, 4, what).faster_than("tq", 8)
    columns = floors[0]["columns"]
    get.notes.append(f"floor: building its {columns} NonTensorStack columns alone takes {floor * 1e3:.1f} ms")
    return [
        samples.row(4, f"{what}: put", "put").faster_than("tq", 10),
        get,
        samples.row(4, f"{what}: get copy=True", "get_copy", tq="get"),
    ]


def images(bench: Bench) -> list[Row]:
    """Case 5: tensors inside dicts of an object column."""
    nbytes = bench.fleet.plain().call("bulk.size", LONG_S, spec=IMAGES)["nbytes"]
    samples = bench.rounds(cycle(IMAGES, copies=False), prepare=loader(IMAGES), memcpy_nbytes=nbytes)
    what = f"32 image dicts, {nbytes / 1e6:.0f} MB"
    return [
        samples.row(5, f"{what}: put", "put").of_memcpy(0.7),
        get_row(samples, 5, what).at_most("<= 3 ms", 3e-3),
    ]


def lists(bench: Bench) -> list[Row]:
    """Case 13: a step of 256 rows as an inference engine answers it, in Python lists."""

    def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
        del system
        where: dict[str, Any] = {"spec": TOKENS, "partition": f"lists-{number}"}
        put = pair.writer.call("bulk.put_lists", LONG_S, **where)["s"]
        got = pair.reader.call("bulk.get_lists", LONG_S, task="bench", **where)["s"]
        return {"put": put, "get": got}

    samples = bench.rounds(body, systems=["ours", "tq"])
    put = samples.row(13, "T1 step of 256 rows from lists: put", "put").at_most("<= 10 ms", 10e-3)
    put.notes.append("TransferQueue 0.1.11 takes no lists: converting them to tensors is in its time")
    return [put, samples.row(13, "T1 step of 256 rows from lists: get", "get")]
