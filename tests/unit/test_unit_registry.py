"""The units of other hosts as the controller's server knows them: who is there, and over which connection."""

from __future__ import annotations

import numpy as np
import pytest

from transfer_queue.errors import ServiceUnavailable
from transfer_queue.server.unit_registry import UnitRegistry, numbers
from transfer_queue.wire import messages as m


class Line:
    """A connection that a unit joins over."""

    def __init__(self, registry: UnitRegistry) -> None:
        self.registry = registry
        self.is_open = True

    def push(self, message: m.Message) -> None: ...

    def abort(self) -> None:
        self.is_open = False

    def join(self, blocks: list[int] | None = None, incarnation: bytes = b"one") -> m.Joined:
        return self.registry.join(m.Join(1, incarnation, "host:1", numbers(blocks or [])), "host:1", self)


@pytest.fixture
def registry() -> UnitRegistry:
    return UnitRegistry()


def test_a_join_of_a_killed_process_that_comes_late_does_not_make_the_unit_seem_away(registry: UnitRegistry) -> None:
    """A cut network held it up. It takes the line's place, and ends a moment later: the living one has to join again,
    and only hears of that when its connection ends."""
    living, late = Line(registry), Line(registry)
    living.join()
    late.join()
    assert not living.is_open
    registry.left(living, 1.0, True)
    again = Line(registry)
    again.join()
    assert not late.is_open
    registry.left(late, 2.0, True)
    assert registry.of_line(again) == 1
    assert not registry.statistics()["1"]["away"]
    assert registry.next_deadline() is None


def test_a_unit_is_hidden_while_no_connection_is_there(registry: UnitRegistry) -> None:
    told: list[tuple[str, int]] = []
    registry.hide, registry.show = (
        (lambda unit: told.append(("hide", unit))),
        (lambda unit: told.append(("show", unit))),
    )
    line = Line(registry)
    line.join()
    registry.left(line, 1.0, True)
    Line(registry).join()
    registry.all_left(2.0)
    assert told == [("show", 1), ("hide", 1), ("show", 1), ("hide", 1)]


def test_rows_of_a_block_that_its_unit_gave_up_are_to_be_put_again(registry: UnitRegistry) -> None:
    line = Line(registry)
    block = (line.join().unit << m.UNIT_SHIFT) + 5
    assert registry.has(block)
    gone = registry.resolve(m.ResolveCommits(2, numbers([block])), 1)
    assert np.frombuffer(gone.numbers, np.int64).tolist() == [block]
    with pytest.raises(ServiceUnavailable, match="put the rows again"):
        registry.has(block)
