"""What happened to rows, as files beside a journal have it for the next service on it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tables import Box, indexes

from transfer_queue.controller import Controller
from transfer_queue.sampler import SequentialSampler
from transfer_queue.server.journal import history
from transfer_queue.server.journal.history import History


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    found = os.open(tmp_path, os.O_RDONLY)
    yield found
    os.close(found)


def kept(box: Box, directory: int) -> History:
    found = History(directory, box.controller)
    found.begin()
    return found


def told(directory: int, of: Box, row: int) -> list[str]:
    """What the next service on the journal of `of` knows of a row."""
    controller = Controller(SequentialSampler())
    controller.lineage.life = of.controller.lineage.life
    History(directory, controller).recall()
    return [one.what for one in controller.state.recent.of_row("p", row)]


def test_rows_in_any_order_are_told(directory: int) -> None:
    box = Box()
    keeper = kept(box, directory)
    rows = indexes(box.put(4))
    lease, _ = box.lend(4)
    box.ack(lease, [rows[2], rows[0]])
    asyncio.run(keeper.close())
    assert told(directory, box, rows[0]) == told(directory, box, rows[2]) == ["written", "taken", "acknowledged"]
    assert told(directory, box, rows[1]) == ["written", "taken"]


def test_numbers_that_mean_other_rows_are_not_told(directory: int) -> None:
    box, other = Box(), Box()
    keeper = kept(box, directory)
    rows = indexes(box.put(4))
    asyncio.run(keeper.close())
    other.controller.lineage.life = b"another life"
    assert told(directory, other, rows[0]) == []
    other.controller.lineage.ends = {box.controller.lineage.life: rows[2]}
    here = other.controller.lineage.are_here(box.controller.lineage.life, np.array(rows))
    assert here.tolist() == [True, True, False, False]


def test_the_oldest_are_forgotten_a_file_at_a_time(directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_NBYTES", 0)
    box = Box()
    keeper = kept(box, directory)
    rows = []
    for _ in range(3):
        rows += indexes(box.put(1))
        keeper._append(keeper._taken())
    asyncio.run(keeper.close())
    assert [told(directory, box, row) for row in rows] == [[], ["written"], ["written"]]


def test_a_full_disk_leaves_a_gap_and_stops_nobody(directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box()
    keeper = kept(box, directory)
    first = indexes(box.put(1))
    keeper._append(keeper._taken())
    write, room = os.pwrite, [5]

    def fill(fd: int, data: memoryview, at: int) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "full")
        return write(fd, data[: room.pop()], at)

    monkeypatch.setattr(os, "pwrite", fill)
    second = indexes(box.put(1))
    with pytest.raises(OSError, match="full"):
        keeper._append(keeper._taken())
    monkeypatch.setattr(os, "pwrite", write)
    third = indexes(box.put(1))
    asyncio.run(keeper.close())
    assert [told(directory, box, *row) for row in (first, second, third)] == [["written"], [], ["written"]]
