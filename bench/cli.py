"""Command line of `python -m bench`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.cases import CASES, TITLES
from bench.environments import ROOT, EnvironmentUnavailable, peer_python
from bench.fleet import PEERS, Fleet, Unavailable
from bench.fresh_memory import touch_memory
from bench.process import AgentError
from bench.result import Row
from bench.rounds import Bench, Options

PACKAGES = ["TransferQueue", "ray", "torch", "tensordict", "numpy", "msgspec"]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options; argparse ends the process when they are wrong."""
    cases = "; ".join(f"{number} {title}" for number, title in TITLES.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure this package beside TransferQueue 0.1.11 and Ray's object store, in one run.",
        epilog=f"Cases: {cases}. The exit status is 1 when ours failed in a case or the run was interrupted; "
        "a missed target does not change it.",
    )
    parser.add_argument("--cases", type=case_list, default=list(CASES), metavar="1,8", help="only these cases")
    parser.add_argument("--quick", action="store_true", help="3 rounds, at most 100 k rows")
    parser.add_argument("--repeat", type=int, metavar="N", help="rounds (default 7; 3 with --quick)")
    parser.add_argument("--no-peers", action="store_true", help="measure ours alone")
    parser.add_argument("--peer-python", type=Path, metavar="PATH", help="interpreter that has the peers")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-out", metavar="DIR", help="default: bench-out")
    return parser.parse_args(arguments)


def case_list(text: str) -> list[int]:
    """Numbers separated by commas. ArgumentTypeError for an unknown one."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from error
    if unknown := [number for number in numbers if number not in CASES]:
        raise argparse.ArgumentTypeError(f"no case {unknown[0]}; there are 1 to {max(CASES)}")
    return numbers


def main(arguments: Sequence[str]) -> int:
    """Run the cases, print the table, write results.json and results.md; return the exit status."""
    asked = parse(arguments)
    repeat = asked.repeat or (3 if asked.quick else 7)
    logs = asked.out.absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("*.log"):
        old.unlink()
    fleet = Fleet(None if asked.no_peers else lambda: peers(asked.peer_python, logs), logs)
    options = Options(repeat=repeat, quick=asked.quick, peers=not asked.no_peers, out=asked.out.absolute())
    bench = Bench(fleet, options)
    machine = report.machine_facts() | {"repeat": repeat, "versions": {}}
    rows: list[Row] = []
    interrupted = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        touch_memory()
        for number in [known for known in CASES if known in asked.cases]:
            bench.say(f"case {number}: {TITLES[number]}")
            rows += run_case(bench, number)
            machine["versions"] |= versions(bench, known=machine["versions"])
            report.write(rows, machine, asked.out)
    except KeyboardInterrupt:
        interrupted = True
        bench.say("interrupted: what follows is what there is")
    finally:
        fleet.close()
    bench.say("done")
    print(report.table(rows))
    print("\n".join(["", *report.remarks(rows)]))
    print(f"\nwritten: {asked.out / 'results.md'}, {asked.out / 'results.json'}")
    return 1 if interrupted or any("ours" in row.failures for row in rows) else 0


def run_case(bench: Bench, number: int) -> list[Row]:
    """Rows of one case. An error outside of the rounds, in the plain agent for one, is a row that says so."""
    try:
        return CASES[number](bench)
    except (AgentError, Unavailable) as error:
        bench.say(f"case {number} failed: {error}")
        return [Row(case=number, what=TITLES[number], failures={"ours": str(error)})]


def peers(override: Path | None, logs: Path) -> Path:
    """Interpreter of the peers. Raises Unavailable, which the rows then say."""
    try:
        return peer_python(override, logs / "pip.log")
    except EnvironmentUnavailable as error:
        print(f"bench: {error}", file=sys.stderr)
        raise Unavailable(str(error)) from error


def versions(bench: Bench, known: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Installed versions by system, of those that run and are not yet known."""
    found = {}
    for system in bench.systems(("ours", *PEERS)):
        if system in known or not bench.fleet.has(system):
            continue
        found[system] = bench.fleet.pair(system).writer.call("life.versions", packages=PACKAGES)
    return found
