"""TransferQueue 0.1.11 and this package, each in an interpreter of its own, asked for the same and compared.

`cases.py` runs the cases written out in `frameworks/calls`. `random_programs.py` plays programs that `topics.py` draws
from seeds: of columns (`drawing.py`), `refusals.py`, samplers (`sampling.py`), streams (`streaming.py`), several
`clients.py`. Both interpreters (`peers.py`) run `frameworks/executor`, `comparing.py` finds the places in which
outcomes differ, and `intended.py` has the differences that are on purpose.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from frameworks.differential import cases, random_programs
from frameworks.differential.peers import NoAnswer, Peer
from frameworks.differential.topics import TOPICS, draw

EXECUTOR = Path(__file__).resolve().parent.parent / "executor"


def main(theirs: Path, ours: Path, environment: Mapping[str, str], logs: Path, arguments: Sequence[str]) -> int:
    """Compare by both interpreters; the number of cases and programs that differ unexpectedly."""
    parser = argparse.ArgumentParser(prog="python -m frameworks differential", description=__doc__)
    parser.add_argument("--random", type=int, default=300, metavar="N", help="play N random programs")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first program; the next ones follow")
    parser.add_argument("--topic", choices=TOPICS, help="of all programs; default: each seed has one")
    asked = parser.parse_args(arguments)
    programs = [draw(seed, asked.topic) for seed in range(asked.seed, asked.seed + asked.random)]
    commands = [[python, "-W", "ignore"] for python in (theirs, ours)]
    # Not in the repository: Ray's workers import from where they are started.
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        wrong = cases.compare(*commands, cwd, environment)
        if not programs:
            return wrong
        there, here = ([*command, EXECUTOR] for command in commands)
        try:
            with (
                Peer([*there, "ray"], cwd, environment, logs / "differential-theirs.log") as their_peer,
                Peer(here, cwd, environment, logs / "differential-ours.log") as our_peer,
            ):
                return wrong + random_programs.compare(programs, their_peer, our_peer)
        except NoAnswer as error:
            print(f"differential: {error}", file=sys.stderr)
            return wrong + 1
