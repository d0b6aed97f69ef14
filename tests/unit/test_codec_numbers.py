"""Many Python numbers converted at once: as one by one, whatever else is among them."""

from __future__ import annotations

import enum
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.bridge.conversion import stored_columns
from transfer_queue.bridge.schema import Ragged, RolloutSchema
from transfer_queue.codec import lists, numbers
from transfer_queue.errors import SchemaViolation

INTS, FLOATS = np.dtype(np.int64), np.dtype(np.float64)


class Level(enum.IntEnum):
    LOW = 1


class Count(int):
    pass


class Share(float):
    pass


STRANGE = [
    True, None, Level.LOW, Count(3), Share(0.5), np.int64(7), np.float32(0.5), 2.5, -1, 2**31 - 1, 2**31, -(2**31),
    -(2**31) - 1, 2**70, float("inf"), float("nan"), 1e300, -0.0, Decimal(1), "i", b"iiii", [1], [], (1, 2), 1j,
]  # fmt: skip


def one_by_one(values: list[Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbers, "FEW", 1 << 62)
        return lists.numbers(values)


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and found.numpy().tobytes() == expected.numpy().tobytes()
    if isinstance(found, tuple) and isinstance(expected, tuple):
        return same(found[0], expected[0]) and np.array_equal(found[1], expected[1])
    return found is None and expected is None


@pytest.mark.parametrize("base", [5, 0.25])
@pytest.mark.parametrize("strange", STRANGE, ids=repr)
@pytest.mark.parametrize("place", [0, 1, 600, -1])
def test_one_strange_item_among_many_numbers_is_noticed(base: Any, strange: Any, place: int) -> None:
    flat = [base] * 1500
    flat[place] = strange
    rows = [flat[:700], [], flat[700:], [base]]
    assert same(lists.numbers(flat), one_by_one(flat))
    assert same(lists.numbers(rows), one_by_one(rows))


@given(
    st.lists(st.lists(st.sampled_from([*STRANGE, 7, 8, 0.5]), max_size=4), max_size=6),
    st.integers(0, 3),
    st.sampled_from([7, 0.5]),
)
def test_rows_with_any_items_are_those_of_the_slow_way(extra: list[list[Any]], at: int, base: Any) -> None:
    rows = [*extra[:at], [base] * 1100, *extra[at:], [base] * 30]
    assert same(lists.numbers(rows), one_by_one(rows))


@pytest.mark.parametrize("items", [(1.0, True), (None,) * 5, (True,) * 5, (b"",), ("",), ([],), (Level.LOW,)])
def test_items_that_take_as_many_bytes_as_ints_are_noticed(items: tuple[Any, ...]) -> None:
    row = [5] * 2000 + list(items)
    assert numbers.exact_numbers([row], INTS) is None
    assert numbers.exact_numbers([[0.5] * 2000 + [True] * 9], FLOATS) is None


def test_many_numbers_are_taken_at_once() -> None:
    count, ends = list(range(-1000, 1000)), [2**31 - 1, -(2**31)]
    found = numbers.exact_numbers([count, [], ends], INTS)
    assert found is not None
    assert found.tolist() == count + ends
    floats, last = [0.5] * 1500, [float("inf"), -0.0]
    found = numbers.exact_numbers([floats, [], last], FLOATS)
    assert found is not None
    assert found.tobytes() == np.array(floats + last).tobytes()


def test_lists_in_each_other_without_end_are_left_to_the_slow_way() -> None:
    row: list[Any] = [1] * 2000
    row[5] = row
    assert numbers.exact_numbers([row], INTS) is None


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
def test_the_bridge_takes_many_numbers_at_once_as_one_by_one(dtype: str) -> None:
    rng = np.random.default_rng(3)
    rows = [rng.integers(-(2**20), 2**20, int(n)).tolist() for n in (900, 0, 800)]
    if dtype.startswith("float"):
        rows = [[number / 8 for number in row] for row in rows]
    found = stored_columns({"x": rows}, RolloutSchema({"x": Ragged(dtype=dtype)}), range(3))["x"]
    assert [row.tolist() for row in found.unbind()] == rows


def test_the_bridge_refuses_what_float32_does_not_hold_among_many() -> None:
    rows = [[0.5] * 2000, [1e300]]
    with pytest.raises(SchemaViolation, match="row 1, field 'x'"):
        stored_columns({"x": rows}, RolloutSchema({"x": Ragged(dtype="float32")}), range(2))
