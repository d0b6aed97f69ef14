"""One group: its slots, the attempts at each, and what came of them.

A slot is one of the siblings. It is tried until it has a result or its attempts are spent. Attempts at it
have rising numbers, and only the last one counts: a result of an earlier one is refused.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from transfer_queue.errors import GroupEnded, InvalidInput, StaleAttempt

Fate = Literal["consumed", "evicted"]
MAX_SIZE = 1 << 14


def attempt_id(slot: int, attempt: int) -> int:
    """An attempt at a slot as one number."""
    return attempt * MAX_SIZE + slot


class Result(msgspec.Struct, frozen=True):
    """What an attempt gave. `rows`: global indexes, of any number. `oldest`, `newest`: the versions of the weights that
    made its tokens. `info` is the producer's own."""

    rows: list[int]
    reward: float | None
    oldest: int
    newest: int
    tokens: int
    info: dict[str, Any]


class Slot(msgspec.Struct):
    """`attempts`: the number of the next one. `failures`: how many failed."""

    state: Literal["idle", "running", "done", "failed"] = "idle"
    attempts: int = 0
    failures: int = 0
    result: Result | None = None


class SiblingGroup(msgspec.Struct):
    """`number`: of its arrival. `start`: the version of the weights when it was opened. `target`: the only version that
    may use it. `ticket`: the one it was opened with. `filtered`: its user does not want it. `times_sampled`: how often
    it was selected, without the times that it was given back. `is_surplus`: newer ones took its place while somebody
    had it, so it goes when it comes back. `unused`: slots whose rows were held back when it was first selected.
    `batch`, `place`: in which batch it was handed out last, and where in it. `is_again`: a trainer that went back to
    an earlier step is to use it once more, as the group was then; until somebody has it, it is due."""

    name: str
    source: str
    number: int
    min_size: int
    prompt: dict[str, Any]
    start: int
    target: int | None
    ticket: int | None
    slots: list[Slot]
    state: Literal["open", "sealed", "lent", "due"] = "open"
    filtered: bool = False
    priority: float = 1.0
    times_sampled: int = 0
    is_surplus: bool = False
    unused: list[int] = []
    batch: int = 0
    place: int = 0
    is_again: bool = False

    @property
    def is_held(self) -> bool:
        """Whether somebody has it, or is to get it again."""
        return self.state in ("lent", "due")

    def slot(self, number: int) -> Slot:
        """`InvalidInput` when there is none."""
        if not 0 <= number < len(self.slots):
            raise InvalidInput(f"slot {number} of group {self.name!r}, which has {len(self.slots)}")
        return self.slots[number]

    def was_opened_as(self, size: int, min_size: int, source: str, prompt: dict[str, Any]) -> bool:
        """Whether these are its size, and what it was opened with."""
        return are_same((len(self.slots), self.min_size, self.source, self.prompt), (size, min_size, source, prompt))

    def idle(self) -> list[int]:
        """The slots that nobody works on, and that have no end yet."""
        return [number for number, slot in enumerate(self.slots) if slot.state == "idle"]

    def begin(self, number: int, first: int = 0) -> int:
        """The number of the new attempt at an idle slot: `first`, or the next one."""
        slot = self.slot(number)
        if slot.state != "idle":
            raise InvalidInput(f"slot {number} of group {self.name!r} is {slot.state}")
        slot.state, slot.attempts = "running", max(slot.attempts, first) + 1
        return slot.attempts - 1

    def unbegin(self, number: int, attempt: int) -> bool:
        """Whether this attempt is under way, which nobody makes: the slot is idle again, and nothing has failed. No
        other attempt has its number."""
        slot = self.slot(number)
        if slot.state != "running" or attempt != slot.attempts - 1:
            return False
        slot.state = "idle"
        return True

    def finish(self, number: int, result: Result) -> None:
        """The last attempt has its result, which `check` says is news."""
        slot = self.slots[number]
        slot.state, slot.result = "done", result

    def check(self, number: int, attempt: int, result: Result | None) -> bool:
        """Whether the result is news: to say it twice changes nothing. It may come of an attempt that was given up and
        that no other one followed. None is a result that no other equals.

        Raises `StaleAttempt` for an earlier attempt, `InvalidInput` for one that was not started, and for another
        result than the first; `GroupEnded` where the slot has failed for good.
        """
        slot = self.slot(number)
        what = f"attempt {attempt} at slot {number} of group {self.name!r}"
        if attempt < slot.attempts - 1:
            raise StaleAttempt(f"{what}: attempt {slot.attempts - 1} took its place")
        if attempt != slot.attempts - 1:
            raise InvalidInput(f"{what} was not started")
        if slot.state == "done":
            if are_same(slot.result, result):
                return False
            raise InvalidInput(f"{what} has another result already")
        if slot.state == "failed":
            raise GroupEnded(f"{what}: the slot has failed for good")
        return True

    def fail(self, number: int, attempt: int, max_attempts: int) -> bool:
        """Whether it is news that this attempt failed. The slot is idle again, or failed for good."""
        slot = self.slot(number)
        if slot.state != "running" or attempt != slot.attempts - 1:
            return False
        slot.failures += 1
        slot.state = "failed" if slot.failures >= max_attempts else "idle"
        return True

    def start_over(self) -> list[int]:
        """Every slot that may be tried again is idle, and no attempt of before counts. Returns the rows of the results
        that are gone."""
        gone: list[int] = []
        for slot in self.slots:
            if slot.result is not None:
                gone += slot.result.rows
            if slot.state != "failed":
                slot.state, slot.result = "idle", None
                slot.attempts += slot.attempts > 0  # the last one is not the last any more
        return gone

    @property
    def results(self) -> list[Result]:
        return [slot.result for slot in self.slots if slot.result is not None]

    @property
    def rows(self) -> list[int]:
        return [row for result in self.results for row in result.rows]

    @property
    def attempts_done(self) -> list[int]:
        """Those that have results (`attempt_id`)."""
        return [attempt_id(number, slot.attempts - 1) for number, slot in enumerate(self.slots) if slot.result]

    @property
    def unused_tokens(self) -> int:
        """Of the results whose rows nobody got."""
        found = [self.slots[number].result for number in self.unused]
        return sum(result.tokens for result in found if result is not None)

    @property
    def can_come(self) -> bool:
        """Whether enough siblings may still get a result."""
        return sum(slot.state != "failed" for slot in self.slots) >= self.min_size

    @property
    def is_whole(self) -> bool:
        """Whether every slot has its end."""
        return all(slot.state in ("done", "failed") for slot in self.slots)

    @property
    def is_sound(self) -> bool:
        """Whether its slots fit together, and its state fits them."""
        whole = self.state == "open" or (self.is_whole and len(self.results) >= self.min_size)
        slots = all((slot.state == "done") == (slot.result is not None) for slot in self.slots)
        slots = slots and all(0 <= number < len(self.slots) for number in self.unused)
        return whole and slots and 1 <= self.min_size <= len(self.slots) <= MAX_SIZE

    def judged_by(self, judge: str) -> int:
        """The version that a policy judges the group by."""
        found = self.results
        if judge == "start" or not found:
            return self.start
        return min(one.oldest for one in found) if judge == "oldest" else max(one.newest for one in found)


def are_same(one: object, other: object) -> bool:
    """Whether two values that came over the wire are the same; a NaN is the same as itself here."""
    return one == other or msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)
