"""Calls in threads while more is read: what is held, and in which order results come."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import until

from transfer_queue.weights.version.threads import Ahead


def test_results_come_in_the_order_of_the_calls() -> None:
    gate = threading.Event()
    with ThreadPoolExecutor(2) as helpers:
        ahead: Ahead[int] = Ahead(helpers, 10)
        ahead.add(1, lambda: 1 if gate.wait(20) else 0)
        ahead.add(1, lambda: 2)
        gate.set()
        assert ahead.end() == [1, 2]
        ahead.add(1, lambda: 3)
        assert ahead.end() == [3]


def test_a_large_one_does_not_keep_the_others_waiting() -> None:
    gate = threading.Event()
    with ThreadPoolExecutor(2) as helpers:
        ahead: Ahead[int] = Ahead(helpers, 10)
        ahead.add(1000, lambda: 0 if gate.wait(20) else -1)
        for number in range(1, 50):
            ahead.add(8, lambda number=number: number)  # type: ignore[misc]
        gate.set()
        assert ahead.end() == list(range(50))


def test_not_more_than_was_said_is_held_besides() -> None:
    gate, begun, added = threading.Event(), [], []
    with ThreadPoolExecutor(8) as helpers:
        ahead: Ahead[bool] = Ahead(helpers, 10)

        def held() -> bool:
            begun.append(1)
            return gate.wait(20)

        def add() -> None:
            for _ in range(5):
                ahead.add(5, held)
                added.append(1)

        adding = threading.Thread(target=add)
        adding.start()
        until(lambda: len(begun) == 4, "the fourth call")  # one besides two that make ten, and the one that is too many
        assert len(added) == 3
        gate.set()
        adding.join()
        assert ahead.end() == [True] * 5


def test_what_a_call_raises_ends_the_reading() -> None:
    with ThreadPoolExecutor(1) as helpers:
        ahead: Ahead[int] = Ahead(helpers, 1)
        ahead.add(1, lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            ahead.end()
        ahead.add(9, lambda: 0)
        ahead.add(1, lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            ahead.add(1, lambda: 0)
