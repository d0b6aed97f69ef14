"""When a page asks for the map of a partition again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transfer_queue.page.maps import LATEST_S, SHARE, MapSeen, cost_of, is_due, state_of


def partition(rows: int, cleared: int = 0) -> Any:
    """As much of an overview as is looked at."""
    return SimpleNamespace(rows=rows, cleared=cleared, written={"x": rows}, tasks=[])


def seen(cost_s: float) -> MapSeen:
    """A map of one row, at 100 s."""
    return MapSeen(b"", cost_s, 100.0, state_of(partition(1)), [], [])


def test_a_partition_that_changed_is_asked_for_again_as_often_as_its_cost_allows() -> None:
    pause_s = 0.006 / SHARE
    assert not is_due(seen(0.006), partition(2), 100 + pause_s - 0.01)
    assert is_due(seen(0.006), partition(2), 100 + pause_s + 0.01)


def test_one_that_did_not_change_is_asked_for_again_once_in_a_while() -> None:
    assert not is_due(seen(0.006), partition(1), 100 + LATEST_S - 0.01)
    assert is_due(seen(0.006), partition(1), 100 + LATEST_S)


def test_rows_that_went_while_as_many_came_are_a_change() -> None:
    assert is_due(seen(0.001), partition(1, cleared=1), 101)


def test_a_call_that_was_slow_once_hardly_puts_the_next_ones_off() -> None:
    assert cost_of(2.0, None) == 2.0
    assert cost_of(0.002, seen(2.0)) == 0.002
    assert 0.002 < cost_of(2.0, seen(0.002)) < 0.003
    assert is_due(seen(2.0), partition(2), 100 + LATEST_S)


def test_without_a_map_it_is_due() -> None:
    assert is_due(None, partition(1), 0.0)
