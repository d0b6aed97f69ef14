"""Starting where others have every processor; case 16."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.cases.batches import LONG_S
from bench.fleet import Unavailable
from bench.result import Row, Samples
from bench.rounds import Bench

PATIENCE_S = 20.0
ROUNDS = 3
AGENTS = {"ours": "ours-ray", "tq": "tq"}


def start_up(bench: Bench) -> list[Row]:
    """Case 16: fresh processes, until `init()` has returned and a first row was put and got."""
    busy, alone, missing = Samples(), Samples(), ""
    for number in range(min(bench.options.repeat, ROUNDS)):
        for system in bench.systems(["ours", "tq"]):
            if system in busy.failures or (missing and system == "ours") or (system == "tq" and number):
                continue
            try:
                metrics = bench.guard(busy, system, partial(one_start, bench, AGENTS[system], True))
            except NoRay as error:
                missing = str(error)
            else:
                busy.add(system, metrics or {})
        if "ours" not in alone.failures:
            alone.add("ours", bench.guard(alone, "ours", partial(one_start, bench, "ours", False)) or {})
    what = "init() and a first put and get"
    row = busy.row(16, f"{what}, 2-processor Ray whose processors are taken", "s").at_most("<= 3 s", 3.0)
    if missing:
        row.skipped = missing
        row.failures.pop("ours")
    if (init := busy.quantile("ours", "init_s")) is not None:
        row.notes.append(f"ours: init() alone {init:.2f} s")
    if "tq" in busy.by_system and not busy.of("tq", "s"):
        row.words["tq"] = f"never (> {PATIENCE_S:g} s)"
    return [row, alone.row(16, f"{what}, without Ray", "s").at_most("<= 1 s", 1.0)]


class NoRay(Exception):
    """No interpreter has both Ray and what our package needs."""


def one_start(bench: Bench, system: str, busy: bool) -> dict[str, Any]:
    """Seconds of one fresh process; {} when it had to be given up. Raises NoRay."""
    try:
        agent = bench.fleet.agent(f"{system}-start", system)
    except Unavailable as error:
        if system == "ours-ray":
            raise NoRay(str(error)) from error
        raise
    try:
        if busy:
            agent.call("starting.occupy", LONG_S)
        found = agent.call("starting.first_round_trip", LONG_S, patience_s=PATIENCE_S)
        agent.call("starting.leave", joined=bool(found))
        if not found:
            agent.kill()  # its thread still waits, and would for ever
        return found
    finally:
        agent.end()
