"""What is measured: every case is a function of a Bench that returns its rows, listed here by number."""

from __future__ import annotations

from collections.abc import Callable

from bench.cases import batches, calls, checkpoints, crowd, hosts, life, mixed, rows, starting, streaming, weights
from bench.result import Row
from bench.rounds import Bench

CASES: dict[int, Callable[[Bench], list[Row]]] = {
    1: batches.dense,
    2: batches.publish,
    3: batches.field_counts,
    4: mixed.complex_batch,
    5: mixed.images,
    6: batches.random_rows,
    7: batches.nine_megabytes,
    8: calls.one_row,
    9: calls.metadata,
    10: calls.waking,
    13: mixed.lists,
    14: streaming.wait,
    15: streaming.rate,
    17: crowd.clients,
    18: crowd.ranks,
    19: hosts.two_hosts,
    20: hosts.relay,
    21: checkpoints.checkpoints,
    22: weights.updates,
    23: weights.fan_out,
    24: weights.late,
    25: weights.difference,
    26: weights.recovery,
    27: rows.reads,
    28: rows.singles,
    29: weights.published,
    11: life.cold_start,
    12: life.memory,
    16: starting.start_up,
}
"""By the number that `--cases` takes, in the order of running: the last three want no other system of ours."""

TITLES: dict[int, str] = {
    1: "dense 302 MB",
    2: "publish of allocated tensors",
    3: "same bytes, 1 to 64 fields",
    4: "complex batch",
    5: "images in dicts",
    6: "256 random rows",
    7: "dense 9 MB",
    8: "one-row operations",
    9: "metadata and listings",
    10: "waking a blocked consumer",
    11: "cold start",
    12: "memory",
    13: "Python lists",
    14: "StreamingDataLoader, wait",
    15: "StreamingDataLoader, samples a second",
    16: "start-up beside busy processors",
    17: "8 to 128 clients at once",
    18: "4 ranks read at once",
    19: "two hosts",
    20: "one-row operations through a joined unit",
    21: "checkpoints",
    22: "weights to a server",
    23: "weights to 1 to 8 servers",
    24: "weights to a late server",
    25: "weights as differences",
    26: "recovery after a failed update of weights",
    27: "rows as rollouts write them",
    28: "rows one at a time",
    29: "weights published, while training goes on",
}
