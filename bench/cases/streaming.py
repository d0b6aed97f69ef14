"""StreamingDataLoader: how long a batch takes to arrive, and how many arrive; cases 14 and 15."""

from __future__ import annotations

from typing import Any

from bench.cases.batches import LONG_S
from bench.fleet import Pair
from bench.result import Row
from bench.rounds import Bench

ROWS = 8
PACE_S = 0.1
LEAD_S = 0.5
"""The consumer waits for the first micro-batch by then."""


def wait(bench: Bench) -> list[Row]:
    """Case 14: a producer that writes 10 micro-batches a second, and a consumer that waits for each."""

    def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
        del system
        where: dict[str, Any] = {"partition": f"stream-{number}", "num": 30, "rows": ROWS}
        consuming = pair.reader.send("streaming.consume", **where)
        written = pair.writer.call("streaming.produce", pace_s=PACE_S, lead_s=LEAD_S, **where)
        held = pair.reader.receive(consuming)["held_ns"]
        pair.writer.call("calls.clear_partition", partition=where["partition"])
        waits = [(h - d) / 1e9 for h, d in zip(held, written["done_ns"], strict=True)]
        return {"wait": waits[1:]}

    samples = bench.rounds(body, systems=["ours", "tq"])
    what = "10 micro-batches of 8 rows a second: put returned -> in the loader's user's hands"
    p50 = samples.row(14, f"{what}: p50", "wait").at_most("<= 3 ms", 3e-3)
    p50.notes.append("TransferQueue 0.1.11 sleeps for 1 s when there is nothing yet")
    return [p50, samples.row(14, f"{what}: p99", "wait", share=0.99)]


def rate(bench: Bench) -> list[Row]:
    """Case 15: everything is written before the consumer begins; from its first micro-batch to its last."""

    def body(pair: Pair, system: str, number: int) -> dict[str, Any]:
        num = 400 if system == "ours" else 60
        where: dict[str, Any] = {"partition": f"ahead-{number}", "num": num, "rows": ROWS}
        pair.writer.call("streaming.produce", LONG_S, pace_s=0.0, lead_s=0.0, **where)
        held = pair.reader.call("streaming.consume", LONG_S, **where)["held_ns"]
        pair.writer.call("calls.clear_partition", partition=where["partition"])
        return {"rate": (num - 1) * ROWS / ((held[-1] - held[0]) / 1e9)}

    samples = bench.rounds(body, systems=["ours", "tq"])
    row = samples.row(15, "samples through a loader, micro-batches of 8", "rate", unit="ops/s").faster_than("tq", 10)
    row.notes.append("checking the numbers and summing the tokens of each micro-batch is in the time")
    return [row]
