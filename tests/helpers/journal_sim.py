"""A service whose journal is on a disk, driven by one seed; what is made of the journal when it ends at any byte.

There are no sockets, threads, forks or syncs: `python -m journal_sim SEED` repeats a run.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ledger_sim import LedgerSimulation, lasting, plain
from standby_sim import BUDGET, MAX_ROWS, SPILL, _short

from transfer_queue.controller import Controller
from transfer_queue.controller.facts import ControllerFact
from transfer_queue.controller.ledger import Ledger
from transfer_queue.server.journal import snapshots
from transfer_queue.server.journal.facts import JournalFact, encoded
from transfer_queue.server.journal.kept_state import KeptService
from transfer_queue.server.journal.kept_unit import KeptUnit
from transfer_queue.server.journal.log import LogFile
from transfer_queue.server.journal.payloads import Payloads
from transfer_queue.server.journal.recovery import recover
from transfer_queue.server.standby.recording import Recorder
from transfer_queue.server.unit_registry import UnitRegistry
from transfer_queue.storage.blocks import SpillSpace


class DiskUnit(KeptUnit):
    """Large blocks are written when they are published, in the same step. Ranges are not used again."""

    payloads: Payloads

    def publish(self, number: int, layout: bytes, digest: int = 0) -> None:
        block = self._blocks[number]
        if not self.is_kept(block):
            place = self.payloads.take(block.nbytes)
            self.stored(number, place._replace(digest=self.payloads.write(place, self.memory(block))))
        super().publish(number, layout, digest)


class JournalSimulation(LedgerSimulation):
    """Every event is a frame, of a log that begins anew with a snapshot now and then. `ends[i]` is how long the log
    was after event i, and `numbers[i]` which one it was."""

    def __init__(self, seed: int, directory: Path) -> None:
        self._directory = directory
        super().__init__(seed, DiskUnit)
        unit = self.service.unit
        assert isinstance(unit, DiskUnit)
        self._kept = unit
        unit.payloads = Payloads(directory, ())
        self.ends: list[int] = []
        self.numbers: list[int] = []
        self.contents: list[dict[int, bytes]] = []
        self._log: LogFile | None = None

    def _write_down(self, facts: list[ControllerFact]) -> None:
        said: list[JournalFact] = [*self._kept.take_facts(), *facts]
        position = len(self.facts)
        self.facts.append(encoded(said))
        if self._log is not None:
            self._log.write(position, [self.facts[-1]])
        if self._log is None or self._random.random() < 0.05:
            self._begin(position + 1)
        assert self._log is not None
        self.ends.append(self._log.nbytes)
        self.numbers.append(self._log.number)
        blocks = [one for one in self._kept._blocks.values() if one.published]
        self.contents.append({one.number: bytes(memoryview(self._kept.memory(one))) for one in blocks})  # type: ignore[arg-type]

    def _begin(self, position: int) -> None:
        controller = self.service.controller
        assert isinstance(controller, Controller)
        number = 0 if self._log is None else self._log.number + 1
        self.end_log()
        self._log = LogFile(self._directory, number, position, number > 0)
        state = KeptService(controller, self.service.members)
        snapshots.write(self._directory, snapshots.head_of(number, position, state), state, self._kept)

    def end_log(self) -> None:
        if self._log is not None:
            os.close(self._log.fd)

    def back(self, event: int, torn: int, without_snapshot: bool) -> tuple[Controller, KeptUnit]:
        """What comes back when the machine stopped `torn` bytes into the frame of the event after this one, or while
        the snapshot of its log was being written."""
        number = self.numbers[event]
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            for path in self._directory.iterdir():
                one = int(path.name.rpartition("-")[2])
                if path.name.startswith("blocks") or one <= number:
                    os.link(path, directory / path.name)
            if without_snapshot and number:
                os.unlink(directory / f"snapshot-{number:08d}")
            log = directory / f"log-{number:08d}"
            data = log.read_bytes()[: self.ends[event] + torn]
            log.unlink()
            log.write_bytes(data)
            controller = Controller(self._sampler(), MAX_ROWS, 3, ledger=Ledger())
            unit = KeptUnit(2 * BUDGET, None, Recorder(), SpillSpace(SPILL.directory, 2 * BUDGET))
            unit.shm.open()
            recover(directory, KeptService(controller, UnitRegistry()), unit)
        controller.check_invariants()
        return controller, unit

    def close(self) -> None:
        super().close()
        self.end_log()
        self._kept.payloads.close()


def differences(seed: int, events: int = 60, stops: int = 3) -> Iterator[str]:
    """What is otherwise than it was when the machine stops at a few moments of a run."""
    with tempfile.TemporaryDirectory() as directory:
        run = JournalSimulation(seed, Path(directory))
        try:
            run.run(events)
            chance = random.Random(seed)
            for event in chance.sample(range(events - 1), stops):
                same_log = run.numbers[event] == run.numbers[event + 1]
                frame = run.ends[event + 1] - run.ends[event] if same_log else 0
                controller, unit = run.back(event, chance.randrange(frame) if frame else 0, chance.random() < 0.3)
                for difference in _compared(run, event, controller, unit):
                    yield f"seed {seed}, event {event}: {difference}"
                unit.close()
        finally:
            run.close()


def _compared(run: JournalSimulation, event: int, controller: Controller, unit: KeptUnit) -> Iterator[str]:
    found, wanted = plain(controller), lasting(run._sampler(), run.states[event])
    for name in wanted:
        if found[name] != wanted[name]:
            yield f"{name} is {_short(found[name], wanted[name])}"
    for number in wanted["blocks"]:
        block: Any = unit.block(number)
        if bytes(memoryview(unit.memory(block))) != run.contents[event][number]:  # type: ignore[arg-type]
            yield f"block {number} has other bytes"
    unit.check_invariants()


if __name__ == "__main__":
    print(*differences(int(sys.argv[1])), sep="\n")
