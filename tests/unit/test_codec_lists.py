"""Plain Python lists and numpy arrays as columns: converted without rounding, or kept as they are."""

from __future__ import annotations

import enum
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from blocks import assert_rows, get, put, same
from tensordict import NonTensorStack, TensorDict

from transfer_queue.codec.plan import plan_batch
from transfer_queue.errors import InvalidInput, UnsupportedValue


class Level(enum.IntEnum):
    LOW = 1


def column(values: Any, rows: int | None = None) -> Any:
    return get(put({"x": values}, len(values) if rows is None else rows), "x")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, -2, 3], torch.tensor([1, -2, 3])),
        ([1.5, -0.0], torch.tensor([1.5, -0.0])),
        ([True, False], torch.tensor([True, False])),
        ([1, 2.5], torch.tensor([1.0, 2.5])),
        ((1, 2), torch.tensor([1, 2])),
        ([2**63 - 1, -(2**63)], torch.tensor([2**63 - 1, -(2**63)])),
    ],
)
def test_a_list_of_numbers_is_a_dense_column(values: Any, expected: torch.Tensor) -> None:
    assert same(column(values), expected)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([[1, 2], [3]], torch.int64),
        ([[1], [], [2, 3]], torch.int64),
        ([[], [0.5]], torch.float32),
        ([[True], [False, True]], torch.bool),
        ([[1, 2.5], [3]], torch.float32),
        ([[1], [2.5]], torch.float32),
        ([[1.5], [2]], torch.float32),
        ([[1.5], [2**24, -(2**24)]], torch.float32),
    ],
)
def test_lists_of_numbers_are_a_ragged_column(values: list[list[Any]], dtype: torch.dtype) -> None:
    assert_rows(column(values), [torch.tensor(row, dtype=dtype) for row in values])


@pytest.mark.parametrize(
    "values",
    [
        [2**63], [-(2**63) - 1, 0], [1e300, 1.0], [True, 1], [1, True], [1.5, True], [1, None], [1, "a"], [1, 1j],
        [None], [[1], [2**63]], [[1.0], [1e39]], [[], []], [[1], "a"], [[1], (2,)], [[1], None], [[[1]],
        [[2]]], [["a"], ["b"]],
        [[True], [1]], [(1, 2), (3,)], [{"a": 1}, {}], ["ab", "c"], [b"ab", b""], [np.int64(1), np.int64(2)],
        [[1], [2, None]], [[1, True]], [[1.5, True]], [[1, Level.LOW]], [[1.5, Level.LOW]], [[1.5, Decimal("0.1")]],
        [[0.5], [Fraction(1, 3)]], [[0.5, 2**24 + 1]], [[2**24 + 1], [0.5]],
        [0.5, 2**24 + 1], [[0.5, -(2**24) - 1]],
    ],
    ids=repr,
)  # fmt: skip
def test_lists_that_do_not_fit_one_number_type_are_kept_as_they_are(values: list[Any]) -> None:
    got = column(values)
    assert isinstance(got, NonTensorStack)
    assert_rows(got, values)


@pytest.mark.parametrize(
    "values", [[[1, np.int64(2)], [3]], [[1.5, np.float32(2.5), np.int32(3)], [1]], [[0.5, 10**8, -(2**24)]]], ids=repr
)
def test_numbers_of_numpy_among_those_of_python_are_numbers(values: list[Any]) -> None:
    dtype = torch.int64 if type(values[0][0]) is int else torch.float32
    assert_rows(column(values), [torch.tensor([float(one) for one in row]).to(dtype) for row in values])


def test_a_tensor_among_numbers_stays_a_tensor() -> None:
    rows = [[1.5, torch.tensor(2)], [torch.tensor(3)]]
    assert same(column(rows).tolist(), rows)


def test_lists_in_a_tensordict_are_kept_as_they_are() -> None:
    batch = TensorDict({"x": NonTensorStack(1, 2), "y": NonTensorStack([1], [2, 3])}, [2])
    block = put(batch, 2)
    assert_rows(get(block, "x"), [1, 2])
    assert_rows(get(block, "y"), [[1], [2, 3]])


def test_floats_are_stored_in_the_precision_training_uses() -> None:
    assert same(column([0.1]), torch.tensor([0.1], dtype=torch.float32))


@pytest.mark.parametrize("dtype", "?bhilBHILefdFD")
def test_a_numpy_column_is_a_tensor_column(dtype: str) -> None:
    x = np.arange(6).reshape(3, 2).astype(dtype)
    assert_rows(column(x), list(torch.from_numpy(x.copy())))


@pytest.mark.parametrize("make", [lambda x: x[::-1], lambda x: x.T, lambda x: np.broadcast_to(x[0], (4, 4))])
def test_a_numpy_column_of_any_memory_order(make: Any) -> None:
    x = make(np.arange(16).reshape(4, 4))
    assert_rows(column(x), list(torch.from_numpy(x.copy())))


def test_a_read_only_numpy_column() -> None:
    x = np.arange(4)
    x.flags.writeable = False
    assert same(column(x), torch.arange(4))


@pytest.mark.parametrize(
    "x",
    [
        np.array(["a", "bc"]), np.array(["2024-01-01", "NaT"], "M8[D]"), np.zeros(2, [("a", "<i4")]),
        np.array([1, "b"], object), np.arange(4, dtype=">i4").reshape(2, 2), np.ones((2, 2), np.longdouble),
    ],
    ids=lambda x: str(x.dtype),
)  # fmt: skip
def test_a_numpy_column_torch_cannot_hold_keeps_its_rows(x: Any) -> None:
    assert_rows(column(x), list(x))


def test_a_numpy_array_without_rows_is_refused() -> None:
    with pytest.raises(InvalidInput, match="field 'x'"):
        plan_batch({"x": np.array(3)}, 1)


def test_a_masked_array_is_refused_instead_of_losing_its_mask() -> None:
    with pytest.raises(UnsupportedValue, match=r"field 'x'.*mask"):
        plan_batch({"x": np.ma.array([1, 2], mask=[0, 1])}, 2)
