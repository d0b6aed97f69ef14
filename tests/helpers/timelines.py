"""What `tq trace` writes, checked against the Trace Event Format."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
SLACK_US = 1e-3  # of a time in microseconds that was a whole number of nanoseconds


class Timeline:
    """A timeline that keeps to the format; its events by kind."""

    def __init__(self, path: Path) -> None:
        text = json.loads(path.read_text(encoding="utf-8"))
        self.about: dict[str, Any] = text["otherData"]
        self.events: list[Event] = text["traceEvents"]
        assert {event["ph"] for event in self.events} <= {"X", "M", "s", "t", "f"}
        self.slices = [event for event in self.events if event["ph"] == "X"]
        self.names = {
            (event["name"], event["pid"], event["tid"]): next(iter(event["args"].values()))
            for event in self.events
            if event["ph"] == "M"
        }
        _check_times(self.events)
        _check_tracks(self.slices, self.names)
        self.flows = _flows(self.events, self.slices)

    def named(self, name: str) -> list[Event]:
        """The slices of this name, in the order of time."""
        return [one for one in self.slices if one["name"] == name]

    def ways(self) -> dict[str, list[str]]:
        """The names of the slices that each flow goes through, by its name."""
        return {name: [step["name"] for step in steps] for name, steps in self.flows.items()}


def _check_times(events: list[Event]) -> None:
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    assert all(time >= 0 for time in times)
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)


def _check_tracks(slices: list[Event], names: dict[tuple[str, int, int], str]) -> None:
    """Slices of a track lie beside or within each other, and every track has a name."""
    open_until: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for one in slices:
        assert one["dur"] > 0
        assert ("process_name", one["pid"], 0) in names
        assert ("thread_name", one["pid"], one["tid"]) in names
        ends = open_until[one["pid"], one["tid"]]
        while ends and ends[-1] <= one["ts"] + SLACK_US:
            ends.pop()
        end = one["ts"] + one["dur"]
        assert not ends or end <= ends[-1] + SLACK_US, f"{one} overlaps another slice"
        ends.append(end)


def _flows(events: list[Event], slices: list[Event]) -> dict[str, list[Event]]:
    """The slices that each flow binds to: a start, steps, an end, each within a slice of its track."""
    found: defaultdict[tuple[Any, ...], list[tuple[str, Event]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            assert event["ph"] != "f" or event["bp"] == "e", "an end binds to the slice around it"
            around = [
                one
                for one in slices
                if (one["pid"], one["tid"]) == (event["pid"], event["tid"])
                and one["name"] != "parked"
                and one["ts"] <= event["ts"] <= one["ts"] + one["dur"]
            ]
            assert around, f"{event} is in no slice"
            found[event["id"], event["cat"], event["name"]].append((event["ph"], around[-1]))
    for steps in found.values():
        kinds = "".join(kind for kind, _ in steps)
        assert kinds == "s" + "t" * (len(kinds) - 2) + "f", kinds
    return {name: [step for _, step in steps] for (_, _, name), steps in found.items()}
