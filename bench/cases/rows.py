"""Rows as asynchronous rollouts write them (case 27), and one at a time (28); each system in processes of its own."""

from __future__ import annotations

from typing import NamedTuple

from bench.contenders import Contender, contenders, in_turn
from bench.reads import LIMIT_S as READS_LIMIT_S
from bench.result import Row, Samples
from bench.rounds import Bench
from bench.singles import CASES as SINGLES
from bench.singles import LIMIT_S as SINGLES_LIMIT_S

ROUNDS = 3
OTHERS = ("redis", "reverb", "pipe")


class Read(NamedTuple):
    what: str
    target_s: float | None = None
    first_s: float | None = None
    p95: float | None = None  # times the median


READS = {
    "alone": Read("1024 rows of 10 fields put alone, 77 MB", 0.020, 0.045, 1.3),
    "later": Read("the same rows 4 s later", 0.020),
    "later_in_order": Read("the same in the order of their puts"),
    "ragged": Read("1024 ragged rows of 8 fields in random order", 0.014),
    "quarter": Read("256 of them", 0.0035),
    "half": Read("every second ragged row"),
    "strided": Read("every fourth ragged row"),
    "eighth": Read("every eighth ragged row"),
    "experts": Read("512 arrays of experts, 237 MB, looked at", 0.025),
    "strings": Read("10,000 rows of 2 short strings", 0.008),
    "second": Read("every second of them", 0.005),
    "traces": Read("1024 tool traces of 12 turns", 0.008),
}


class Single(NamedTuple):
    what: str
    target_s: float | None = None
    rows_s: float | None = None  # at least


ROWS = {
    "take-1": Single("take one row of 1 KB", 90e-6),
    "take-100": Single("take one row of 100 KB", 120e-6),
    "take-1000": Single("take one row of 1 MB", 220e-6),
    "crowd": Single("take one row of 1 KB, 8 processes at once", None, 12_000),
    "flow": Single("rows of 100 KB from 4 processes to 4: put, take, remove", None, 6_000),
    "paced-1": Single("a row of 1 KB every 10 ms, from before its put until it is in hand", 400e-6),
    "paced-100": Single("a row of 100 KB every 10 ms, from before its put until it is in hand", 500e-6),
}

assert ROWS.keys() == SINGLES.keys()


def reads(bench: Bench) -> list[Row]:
    """Case 27. TransferQueue takes its turn once: it is half a minute with the start of its cluster."""
    peers = contenders("ray,0.1.11,hand" if bench.options.peers else "", bench.say)
    systems = {"ours": Contender("queue"), **{name.replace("0.1.11", "tq"): one for name, one in peers.items()}}
    found: list[Row] = []
    for case, read in READS.items():
        bench.say(f"  {read.what}")
        samples = _measured(bench, systems, "bench.reads", case, READS_LIMIT_S)
        row = samples.row(27, f"get: {read.what}", "reads")
        if read.target_s is not None:
            row.at_most(f"<= {1e3 * read.target_s:g} ms", read.target_s)
        row.faster_than("ray", 1)
        if read.p95 is not None:
            median, p95 = row.values.get("ours"), samples.quantile("ours", "reads", 0.95)
            row.within(f"p95 <= {read.p95:g} x", p95 / median if median and p95 else None, read.p95)
        for system in systems:
            if samples.of(system, "reads"):
                p95, collected = samples.quantile(system, "reads", 0.95), samples.quantile(system, "collected")
                row.notes.append(
                    f"{system}: median {_ms(samples.quantile(system, 'reads'))}, p95 {_ms(p95)}, "
                    f"first {_ms(samples.quantile(system, 'first'))}, garbage collector {_ms(collected)} a read"
                )
        found.append(row)
        if read.first_s is not None:
            first = samples.row(27, f"get: {read.what}, the first of a process", "first")
            found.append(first.at_most(f"<= {1e3 * read.first_s:g} ms", read.first_s))
    return found


def singles(bench: Bench) -> list[Row]:
    """Case 28."""
    peers = contenders(",".join(OTHERS) if bench.options.peers else "", bench.say)
    systems = {"ours": Contender("queue"), "take": Contender("take"), **peers}
    found: list[Row] = []
    for case, single in ROWS.items():
        bench.say(f"  {single.what}")
        samples = _measured(bench, systems, "bench.singles", case, SINGLES_LIMIT_S)
        row = samples.row(28, single.what, "seconds")
        if single.rows_s is not None:
            row = samples.row(28, single.what, "rate", unit="ops/s")
            row.at_least(f">= {single.rows_s:,} /s", single.rows_s)
        if single.target_s is not None:
            row.at_most(f"<= {1e6 * single.target_s:g} us", single.target_s)
        for system in systems:
            if samples.of(system, "seconds"):
                name = "ours by take()" if system == "take" else system
                median, p95 = (samples.quantile(system, "seconds", share) for share in (0.5, 0.95))
                rate = samples.quantile(system, "rate") or 0
                row.notes.append(f"{name}: median {_us(median)}, p95 {_us(p95)}, {rate:,.0f} rows/s")
        found.append(row)
    return found


def _measured(bench: Bench, systems: dict[str, Contender], module: str, case: str, limit_s: float) -> Samples:
    """What the systems measured, and who failed."""
    samples = Samples()
    for name, measured in in_turn(systems, module, case, limit_s, min(bench.options.repeat, ROUNDS), once=("tq",)):
        if measured is None:
            samples.failures[name] = f"not done within {limit_s} s, or failed"
        else:
            samples.add(name, measured)
    return samples


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3g} ms"


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e6 * seconds:.0f} us"
