"""Plays random programs with both packages and compares them call by call; what differs unexpectedly is made short."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from frameworks.differential.comparing import Place, places
from frameworks.differential.drawing import Call, Program
from frameworks.differential.intended import Step, apart, raised, rule_for
from frameworks.differential.peers import Peer

SHRINK_DEADLINE_S = 20.0
LEFT_HERE = "left by what is refused here"
WITH_REFUSED = "after a refused call that was made, and was not made"


@dataclass
class Verdict:
    """How a program went: the differences on purpose, by reason, and the first one that is not, with what led there."""

    compared: int = 0
    intended: Counter[str] = field(default_factory=Counter)
    calls: list[Call] = field(default_factory=list)
    unexpected: list[Place] = field(default_factory=list)

    def kind(self) -> tuple[object, ...] | None:
        """What stays the same about an unexpected difference when the program gets shorter."""
        if not self.unexpected:
            return None
        path = [key for key in self.unexpected[0].path if isinstance(key, str)]
        return (self.calls[-1]["call"], *path)


def judged(program: Program, calls: Sequence[Call], theirs: Peer, ours: Peer) -> Verdict:
    """Play these calls up to their first unexpected difference.

    A call after which the two services hold different things, as intended, is taken out, and the rest played without
    it. What this package refused must not matter then: the rest has to go as it did with that call.
    """
    verdict, left = Verdict(calls=list(calls)), 0
    before: list[Any] | None = None  # how the rest went here with the refused call that was taken out
    while True:
        theirs.ask(program, verdict.calls)
        ours.ask(program, verdict.calls)
        outcomes = list(zip(theirs.answer(), ours.answer(), strict=True))
        for at in range(left, len(outcomes)):
            steps = steps_of(verdict.calls[at], *outcomes[at], verdict.calls[:at], program.sampler[0])
            ruled = [(step, place, rule_for(step, place)) for step in steps for place in differences(step)]
            verdict.compared += len(steps)
            verdict.unexpected = [place for _, place, rule in ruled if rule is None]
            if before is not None:
                verdict.unexpected += places({WITH_REFUSED: before[at - left]}, {WITH_REFUSED: outcomes[at][1]})
            if verdict.unexpected:
                del verdict.calls[at + 1 :]
                return verdict
            why = [reason for reason in map(apart, steps) if reason]
            verdict.intended.update(why)
            for step in steps:
                verdict.intended.update({rule.reason for of, _, rule in ruled if of is step and rule is not None})
            if why or any(rule is not None and rule.diverges for *_, rule in ruled):
                before = [ours for _, ours in outcomes[at + 1 :]] if all(raised(step.ours) for step in steps) else None
                del verdict.calls[at]
                left = at
                break
        else:
            return verdict


def begun_by(call: Call) -> list[Call]:
    """The call, or those that it begins together."""
    return [{**one, "on": call["on"]} for one in call["with"]["calls"]] if call["call"] == "together" else [call]


def steps_of(call: Call, theirs: Any, ours: Any, before: list[Call], sampler: str) -> list[Step]:
    """A call with its outcomes; of calls that were begun together each with its own."""
    alone = [one for call in before for one in begun_by(call)]
    inner = begun_by(call)
    if call["call"] != "together" or "returns" not in theirs or "returns" not in ours:
        return [Step(call, theirs, ours, alone, sampler)]
    outcomes = zip(inner, theirs["returns"], ours["returns"], strict=True)
    return [Step(one, there, here, [*alone, *inner], sampler) for one, there, here in outcomes]


def differences(step: Step) -> list[Place]:
    """Where the outcomes differ; and what a refused call left behind here, which is never anything."""
    left = step.ours.get("left") if isinstance(step.ours, dict) else None
    return [*places(step.theirs, step.ours), *([Place((LEFT_HERE,), [], left)] if left else [])]


def shortest(program: Program, verdict: Verdict, theirs: Peer, ours: Peer) -> Verdict:
    """A program that shows the same difference, from which no call can be dropped."""
    deadline = time.monotonic() + SHRINK_DEADLINE_S
    at = len(verdict.calls) - 2
    while at >= 0 and time.monotonic() < deadline:
        fewer = judged(program, [*verdict.calls[:at], *verdict.calls[at + 1 :]], theirs, ours)
        if fewer.kind() == verdict.kind():
            verdict = fewer
            at = min(at, len(verdict.calls) - 1)
        at -= 1
    return verdict


def shown(program: Program, verdict: Verdict) -> str:
    """What somebody needs to see a difference again."""
    again = f"--random 1 --seed {program.seed} --topic {program.topic}"
    lines = [f"seed {program.seed} ({again}), {program.sampler[0]}:"]
    for call in verdict.calls:
        kept = f"{call['keep']} = " if "keep" in call else ""
        twin = "async_" if call.get("async") else ""
        by = f", by {call['by']}" if "by" in call else ""
        given = ", ".join(f"{name}={json.dumps(value)}" for name, value in call["with"].items())
        lines.append(f"  {kept}{call['on']}.{twin}{call['call']}({given}){by}")
    for place in verdict.unexpected[:4]:
        where = ".".join(map(str, place.path)) or "outcome"
        lines += [
            f"  {where}",
            f"    theirs {json.dumps(place.theirs)[:600]}",
            f"    ours   {json.dumps(place.ours)[:600]}",
        ]
    return "\n".join(lines)


def compare(programs: Sequence[Program], theirs: Peer, ours: Peer) -> int:
    """Play all programs, print what differs; how many differ unexpectedly."""
    start, compared, wrong = time.monotonic(), 0, 0
    reasons: Counter[str] = Counter()
    # A service has one sampler: the programs of each after one another.
    for program in sorted(programs, key=lambda program: str(program.sampler)):
        verdict = judged(program, program.calls, theirs, ours)
        compared += verdict.compared
        reasons += verdict.intended
        if verdict.unexpected:
            wrong += 1
            print(shown(program, shortest(program, verdict, theirs, ours)), flush=True)
    took = time.monotonic() - start
    print(f"differential: {len(programs)} random programs, {compared} calls compared in {took:.0f} s")
    for reason, count in reasons.most_common():
        print(f"differential: {count} calls differ as intended: {reason}")
    print(f"differential: {wrong} programs differ unexpectedly")
    return wrong
