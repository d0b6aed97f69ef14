"""The rounds: every system does the same thing in turn, and the order turns with every round."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.environments import ROOT
from bench.fleet import PEERS, Fleet, Pair, Unavailable
from bench.process import AgentError
from bench.result import Samples

Body = Callable[[Pair, str, int], dict[str, Any]]
Prepare = Callable[[Pair, str], None]
SYSTEMS = ("ours", *PEERS)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asked for."""

    repeat: int = 7
    quick: bool = False
    peers: bool = True
    """False: only ours is measured."""
    out: Path = ROOT / "bench-out"
    """Where results go, and what a case writes to disk meanwhile."""


@dataclass
class Bench:
    """Handed to every case."""

    fleet: Fleet
    options: Options
    started: float = field(default_factory=time.monotonic)

    def systems(self, wanted: Sequence[str] = SYSTEMS) -> list[str]:
        """Those of the wanted systems that this run measures."""
        return [system for system in wanted if system == "ours" or self.options.peers]

    def say(self, text: str) -> None:
        """Progress, on stderr."""
        print(f"bench: {time.monotonic() - self.started:6.1f} s  {text}", file=sys.stderr, flush=True)

    def rounds(
        self,
        body: Body,
        *,
        systems: Sequence[str] = SYSTEMS,
        prepare: Prepare | None = None,
        cleanup: Prepare | None = None,
        memcpy_nbytes: int = 0,
        warm_up: int = 1,
        at_most: int | None = None,
    ) -> Samples:
        """Run `body(pair, system, round)` for every system in turn, `repeat` rounds after `warm_up` uncounted ones.

        `at_most` bounds the rounds. `prepare` runs once a system before, `cleanup` once after. A memory copy of
        `memcpy_nbytes` takes its turn in every round (system "plain", metric "memcpy"). A system that fails is left out
        from there on, its error is in `failures` and its processes are ended; the others go on.
        """
        samples = Samples()
        pairs: dict[str, Pair] = {}
        for system in self.systems(systems):
            self.guard(samples, system, partial(self._open, pairs, system, prepare))
        turns = [*pairs, "plain"] if memcpy_nbytes else list(pairs)
        repeat = min(self.options.repeat, at_most or self.options.repeat)
        for number in range(-warm_up, repeat):
            for system in turns[number % len(turns) :] + turns[: number % len(turns)] if turns else []:
                if system in samples.failures:
                    continue
                metrics = self.guard(samples, system, partial(self._turn, pairs, system, number, body, memcpy_nbytes))
                if metrics is not None and number >= 0:
                    samples.add(system, metrics)
                elif metrics is not None and number == -warm_up:
                    samples.first[system] = metrics
        for system, pair in pairs.items():
            if system not in samples.failures:
                self.guard(samples, system, partial(self._close, pair, system, cleanup))
        return samples

    def _open(self, pairs: dict[str, Pair], system: str, prepare: Prepare | None) -> None:
        pair = self.fleet.pair(system)
        if prepare is not None:
            prepare(pair, system)
        pairs[system] = pair

    def _close(self, pair: Pair, system: str, cleanup: Prepare | None) -> None:
        if cleanup is not None:
            cleanup(pair, system)
        for agent in (pair.writer, pair.reader):
            agent.call("bulk.forget")

    def _turn(self, pairs: dict[str, Pair], system: str, number: int, body: Body, nbytes: int) -> dict[str, Any]:
        if system == "plain":
            return {"memcpy": self.fleet.plain().call("bulk.memcpy", nbytes=nbytes)["s"]}
        return body(pairs[system], system, number)

    def guard(self, samples: Samples, system: str, action: Callable[[], Any]) -> Any:
        """Run an action of one system; what it raises becomes that system's failure."""
        try:
            return action()
        except (Unavailable, AgentError) as error:
            self.say(f"{system} failed: {error}")
            samples.failures[system] = str(error)
            self.fleet.discard(system)
            return None
