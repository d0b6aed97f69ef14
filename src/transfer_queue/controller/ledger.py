"""Writing down what lasts, as facts in the order in which it happened.

What tasks took is written down as it is when the event is over, or when the next fact is: a row that was lent and given
back meanwhile is in it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from transfer_queue.controller import facts as f
from transfer_queue.controller.readiness import RESERVED, Flags, Slots, Task
from transfer_queue.wire import messages as m


class Consumed(Protocol):
    """A table as far as its tasks are concerned."""

    name: str
    tasks: dict[str, Task]
    index: NDArray[np.int64]
    alive: Flags


class Numbering(Protocol):
    """Where the number of the next new row is."""

    next_index: int


class Ledger:
    """The facts since they were taken last."""

    def __init__(self) -> None:
        self.tables: Mapping[str, Consumed] = {}
        self._facts: list[f.ControllerFact] = []
        self._applying: list[f.Applied] = []  # requests that are being carried out, the one that came of another last
        self._touched: list[TaskWatch] = []
        self._granted: dict[str, tuple[int, int]] = {}

    def note(self, fact: f.ControllerFact) -> None:
        """This happened, after everything that was said before."""
        self._write_down()
        self._facts.append(fact)

    def noting(self, rule: Callable[[Any], m.Reply], numbering: Numbering) -> Callable[[Any], m.Reply]:
        """`rule`, of which it is noted what it was asked, before all that comes of it. What it refuses is no fact."""

        def apply(message: Any) -> m.Reply:
            if type(message) is m.Find and not message.create:
                return rule(message)
            self._write_down()
            fact, place = f.Applied(message, -1), len(self._facts)
            for outer in self._applying:  # this one came of it, so it has done what it does by itself
                outer.next_index = numbering.next_index if outer.next_index < 0 else outer.next_index
            self._applying.append(fact)
            try:
                reply = rule(message)
            finally:
                self._applying.pop()
            fact.next_index = numbering.next_index if fact.next_index < 0 else fact.next_index
            self._facts.insert(place, fact)
            return reply

        return apply

    def watch(self, table: Consumed, name: str) -> TaskWatch:
        """Of a new task of a table, which is a fact in itself: what is asked of all tasks is asked of it, too."""
        if self.tables.get(table.name) is table:  # not one that is being loaded
            self.note(f.RowsTaken(table.name, name, b"", b"", []))
        return TaskWatch(self._touched, table, name)

    def granted(self, task: str, base: int, rows: int) -> None:
        """What producers may have started for a task is another number than before."""
        self._granted[task] = base, rows

    def take(self) -> list[f.ControllerFact]:
        """What was noted, which is forgotten here."""
        if self._touched or self._granted:
            self._write_down()
        found, self._facts = self._facts, []
        return found

    def _write_down(self) -> None:
        for watch in self._touched:
            has_news, slots = watch.has_new_terms, watch.taken()
            if self.tables.get(watch.table.name) is watch.table and (len(slots) or has_news):
                self._facts.append(_taken(watch.table, watch.name, slots))
        self._touched.clear()
        self._facts += [f.Granted(task, *grant) for task, grant in self._granted.items()]
        self._granted.clear()


class TaskWatch:
    """Which slots of a task were touched: used, given back, kept for it or not, returned or not."""

    def __init__(self, touched: list[TaskWatch], table: Consumed, name: str) -> None:
        self.table = table
        self.name = name
        self.has_new_terms = False
        self._touched = touched
        self._slots: list[Slots] = []

    def note_terms(self) -> None:
        self.has_new_terms = True
        self.touch(np.empty(0, np.int64))

    def touch(self, slots: Slots) -> None:
        if not self._slots:
            self._touched.append(self)
        self._slots.append(slots)

    def moved(self, order: Slots) -> None:
        """The table keeps these slots only, in this order."""
        if self._slots:
            self._slots = [np.flatnonzero(np.isin(order, np.concatenate(self._slots)))]

    def taken(self) -> Slots:
        """The slots of live rows that were touched, which are forgotten here."""
        slots = self._slots[0] if len(self._slots) == 1 else np.unique(np.concatenate(self._slots))
        self._slots, self.has_new_terms = [], False
        return slots[self.table.alive[slots]]


def _taken(table: Consumed, name: str, slots: Slots) -> f.RowsTaken:
    task = table.tasks[name]
    used = task.consumed[slots] + np.uint8(f.KEPT) * (task.lease[slots] == RESERVED)
    returned = [
        (place, one.attempts, one.reason, one.dead)
        for place, slot in enumerate(slots.tolist() if task.returned else ())
        if (one := task.returned.get(slot)) is not None
    ]
    fates = task.fates[slots]
    return f.RowsTaken(
        table.name, name, table.index[slots].tobytes(), used.astype(np.uint8).tobytes(), returned,
        fates.tobytes() if fates.any() else b"",
        [(place, delay_s) for place, *_ in returned if (delay_s := task.delay_of(int(slots[place])))],
        task.max_deliver or 0, task.num_stale,
    )  # fmt: skip
