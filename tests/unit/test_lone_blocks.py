"""Which rows that were put alone are worth gathering, and what the controller makes of those that were."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tables import Box

from transfer_queue.controller.lone_blocks import MAX_ROUNDS, MAX_ROWS, MIN_ROWS, LoneBatch
from transfer_queue.errors import ProtocolError
from transfer_queue.wire import messages as m

ENOUGH = MIN_ROWS + 3


@pytest.fixture
def box() -> Box:
    return Box()


def put_alone(box: Box, count: int, first: int = 0, fields: tuple[str, ...] = ("x", "y"), partition: str = "p") -> None:
    for number in range(first, first + count):
        box.put([f"k{number}"], list(fields), None, partition)


def rounds(box: Box, count: int = 1) -> list[LoneBatch]:
    lone_blocks = box.controller.state.lone_blocks
    return [batch for _ in range(count) for batch in lone_blocks.round() if batch is not None]


def test_rows_are_found_once_a_round_brought_no_more(box: Box) -> None:
    put_alone(box, ENOUGH)
    assert not rounds(box, 2)
    put_alone(box, 1, ENOUGH)
    (batch,) = rounds(box, 1)
    assert batch.blocks.tolist() == list(range(1, ENOUGH + 1))
    assert (np.diff(batch.rows) > 0).all()
    assert len(batch.rows) == ENOUGH
    assert not rounds(box, 3)


def test_fewer_than_enough_wait_for_others_of_their_partition_and_fields(box: Box) -> None:
    put_alone(box, MIN_ROWS - 1)
    put_alone(box, 1, fields=("x",), partition="q")
    put_alone(box, 1, 1000, fields=("y",))
    assert not rounds(box, 5)
    assert not box.controller.state.lone_blocks.is_due, "nothing to do until another row is put"
    put_alone(box, 1, 2000)
    (batch,) = rounds(box, 3)
    assert len(batch.blocks) == MIN_ROWS


def test_a_stream_of_rows_is_found_when_it_is_many_or_has_waited_long(box: Box) -> None:
    put_alone(box, MAX_ROWS)
    (batch,) = rounds(box, 2)
    assert len(batch.blocks) == MAX_ROWS
    for number in range(MAX_ROUNDS + 2):
        put_alone(box, MIN_ROWS // MAX_ROUNDS + 1, 10_000 + 100 * number)
        assert bool(rounds(box)) == (number == MAX_ROUNDS + 1)


@pytest.mark.parametrize("end", ["cleared", "overwritten", "in part", "partition"])
def test_rows_that_are_gone_or_written_anew_are_not_found(box: Box, end: str) -> None:
    put_alone(box, ENOUGH)
    rounds(box)
    if end == "cleared":
        box.clear([f"k{number}" for number in range(ENOUGH)])
    elif end == "overwritten":
        box.put([f"k{number}" for number in range(ENOUGH)], ["x", "y"])
    elif end == "in part":
        box.put([f"k{number}" for number in range(ENOUGH)], ["y"])
    else:
        box.clear()
        box.put(["another"])
    assert not rounds(box, 3)


def gathered(box: Box) -> tuple[LoneBatch, Callable[[], bool]]:
    put_alone(box, ENOUGH)
    (batch,) = rounds(box, 3)
    return batch, lambda: box.controller.gather(9000, batch.blocks, batch.rows)


def test_all_cells_of_gathered_rows_lie_in_the_new_block(box: Box) -> None:
    batch, gather = gathered(box)
    assert gather()
    box.controller.check_invariants()
    assert sorted(box.freed()) == batch.blocks.tolist()
    assert box.cells(["k5", "k1"]) == {"x": [(9000, 5), (9000, 1)], "y": [(9000, 5), (9000, 1)]}
    assert not gather()


def test_rows_that_changed_while_they_were_gathered_stay_where_they_are(box: Box) -> None:
    _, gather = gathered(box)
    box.clear(["k0"])
    box.put(["k1"], ["x", "y"])
    box.put(["k2"], ["y"])
    before = box.cells(["k1", "k2"])
    box.freed()
    assert gather()
    box.controller.check_invariants()
    assert box.cells(["k1", "k2"]) == before
    assert box.cells(["k3", "k4"])["x"] == [(9000, 3), (9000, 4)]
    box.clear()
    box.controller.tidy()
    assert not box.controller.block_index.entries


def test_a_block_that_cannot_be_theirs_is_refused(box: Box) -> None:
    batch, _ = gathered(box)
    for target in (1, (1 << m.UNIT_SHIFT) + 5):
        with pytest.raises(ProtocolError):
            box.controller.gather(target, batch.blocks, batch.rows)
    for blocks, rows in ((batch.blocks, batch.rows[:-1]), (batch.blocks[[1, 1]], batch.rows[[1, 1]])):
        with pytest.raises(ProtocolError):
            box.controller.gather(9000, blocks, rows)
    assert box.cells(["k1"])["x"] == [(2, 0)]


def test_a_row_that_lies_elsewhere_does_not_move(box: Box) -> None:
    put_alone(box, 2)
    assert not box.controller.gather(9000, np.array([2]), np.array([0]))
    assert not box.controller.gather(9000, np.array([77]), np.array([0]))
    box.controller.check_invariants()
    assert box.cells(["k0", "k1"])["x"] == [(1, 0), (2, 0)]
