"""What columns of rollouts may be, and that they come back as they were (`transfer_queue.bridge`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pandas
import pytest
import torch
from tensordict import NonTensorData

import transfer_queue as tq
from transfer_queue.bridge import (
    Inferred,
    Numbers,
    Objects,
    Ragged,
    RolloutBridge,
    RolloutColumn,
    RolloutSchema,
    Schedule,
)
from transfer_queue.errors import InvalidInput, SchemaViolation


@pytest.fixture
def step(shared: tq.TransferQueueClient, request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.node.name
    shared.clear_partition(request.node.name)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float32", "bool", "uint64"])
def test_truth_values_of_numpy_are_numbers_of_a_row(shared: tq.TransferQueueClient, step: str, dtype: str) -> None:
    bridge = RolloutBridge(shared, RolloutSchema({"masks": Ragged(dtype=dtype)}))
    bridge.put(step, {"masks": [list(np.array([True, False])), [1, np.True_, 0], []]})
    found = bridge.fetch(step, "actor", timeout_s=5)["masks"]
    assert [row.tolist() for row in found] == [[1, 0], [1, 1, 0], []]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_column_may_be_a_nested_tensor(shared: tq.TransferQueueClient, step: str, layout: torch.layout) -> None:
    bridge = RolloutBridge(shared, RolloutSchema({"tokens": Ragged()}))
    column = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=layout)
    bridge.put(step, {"tokens": column}, schedule=Schedule(partitions=[[1, 0]]))
    assert [row.tolist() for row in bridge.fetch(step, "actor", timeout_s=5)["tokens"]] == [[3], [1, 2]]


@pytest.mark.parametrize(
    ("stored", "values", "asked"),
    [
        (Ragged(dtype="int64"), [[2**40]], Ragged(dtype="int32")),
        (Ragged(dtype="int64"), [[2**40]], Ragged(dtype="float64")),
        (Ragged(dtype="float32"), [[1.5]], Ragged(dtype="int64")),
        (Numbers(dtype="float64"), [1.5], Numbers(dtype="int64")),
        (Numbers(dtype="float64"), [0.1], Numbers(dtype="float32")),
        (Numbers(), [1.5], Ragged(dtype="float32")),
        (Ragged(dtype="float32"), [[1.5]], Numbers()),
        (Objects(), [{"a": 1}], Numbers()),
        (Objects(), [{"a": 1}], Ragged()),
    ],
)  # fmt: skip
def test_a_rank_with_another_schema_gets_no_other_numbers(
    shared: tq.TransferQueueClient, step: str, stored: Any, values: Any, asked: Any
) -> None:
    RolloutBridge(shared, RolloutSchema({"x": stored})).put(step, {"x": values})
    with pytest.raises(SchemaViolation, match="'x'"):
        RolloutBridge(shared, RolloutSchema({"x": asked})).fetch(step, "actor", timeout_s=5)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (Numbers(), [np.complex64(1 + 2j)]), (Ragged(dtype="float32"), [[np.complex64(1 + 2j)]]),
        (Numbers(dtype="int64"), [torch.tensor(3.7)]), (Ragged(), [[1], torch.tensor(3)]),
        (Ragged(dtype="float32"), [torch.ones(2, device="meta")]),
        (Ragged(dtype="float32"), [torch.ones(2).to(torch.float8_e4m3fn)]),
        (Ragged(dtype="float32"), [torch.ones(2, dtype=torch.complex64).conj()]),
        (Ragged(dtype="float32"), [[1, np.complex64(2 + 3j)]]), (Ragged(dtype="float64"), [[1.0, np.array(2 + 3j)]]),
        (Numbers(), [1.0, np.array(2 + 3j)]), (Ragged(), [[torch.tensor(2.0, requires_grad=True)]]),
        (Numbers(), [torch.empty((), device="meta")]), (Ragged(), [[torch.tensor(1 << 63, dtype=torch.uint64)]]),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Casting complex")  # as outside of tests, where that is no error
def test_what_is_no_such_number_is_refused_with_its_field(
    shared: tq.TransferQueueClient, column: Any, values: list[Any]
) -> None:
    with pytest.raises(SchemaViolation, match=r"row [01], field 'x'"):
        RolloutBridge(shared, RolloutSchema({"x": column})).put("refused", {"x": values})


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (Ragged(shape=(3,)), [[[1, 2, 3]], []]), (Ragged(), [torch.tensor([1, 2]), torch.tensor([])]),
        (Ragged(), [np.array([1]), np.array([])]), (Ragged(dtype="bool"), [[True, False], []]),
    ],
)  # fmt: skip
def test_an_empty_row_is_of_any_dtype(
    shared: tq.TransferQueueClient, step: str, column: Any, values: list[Any]
) -> None:
    bridge = RolloutBridge(shared, RolloutSchema({"x": column}))
    bridge.put(step, {"x": values})
    first, empty = bridge.fetch(step, "actor", timeout_s=5)["x"]
    assert (first.tolist(), len(empty), str(empty.dtype)) == (
        torch.as_tensor(values[0]).tolist(), 0, f"torch.{column.dtype}",
    )  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        np.array(["a", "b"]), [np.str_("a"), "b"], np.array([b"a", b"b"]), np.array(["2020-01-01"], "datetime64[D]"),
        [np.complex64(1 + 2j)], [torch.ones(2, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)],
        [torch.ones(2, dtype=torch.complex64)], [torch.ones(2).to(torch.float8_e4m3fn)],
        [torch.ones(3, 8, 4), torch.zeros(3, 2, 4)], [np.ones((2, 3)), np.zeros((2, 1))], [[1 << 63], [1]],
        [np.timedelta64(3, "s")], [1 << 65, 1], [torch.ones(2), None], [[2**63, -1], [1]],
    ],
)  # fmt: skip
def test_what_is_inferred_comes_back_as_it_was(shared: tq.TransferQueueClient, step: str, values: Any) -> None:
    bridge = RolloutBridge(shared, RolloutSchema({"x": Inferred()}))
    bridge.put(step, {"x": values})
    found = bridge.fetch(step, "actor", timeout_s=5)["x"]
    for got, was in zip(found, values, strict=True):
        assert type(got) is type(was)
        assert (
            (got.tolist(), str(getattr(got, "dtype", ""))) == (was.tolist(), str(was.dtype))
            if hasattr(was, "dtype")
            else got == was
        )


def test_a_rank_with_a_wider_schema_gets_its_dtype(shared: tq.TransferQueueClient, step: str) -> None:
    narrow = RolloutSchema({"n": Numbers(dtype="int32"), "r": Ragged(dtype="float32")})
    RolloutBridge(shared, narrow).put(step, {"n": [7, 8], "r": [[0.5], []]})
    wide = RolloutSchema({"n": Numbers(dtype="int64"), "r": Ragged(dtype="float64")})
    got = RolloutBridge(shared, wide).fetch(step, "actor", timeout_s=5)
    assert (got["n"].dtype, got["n"].tolist()) == (torch.int64, [7, 8])
    assert [(row.dtype, row.tolist()) for row in got["r"]] == [(torch.float64, [0.5]), (torch.float64, [])]


@pytest.mark.parametrize("form", ["tensors", "arrays", "lists"])
@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
     "longlong", "ulonglong", ">i4", ">f8"],
)  # fmt: skip
def test_each_dtype_comes_back_in_each_form(
    shared: tq.TransferQueueClient, step: str, dtype: str, form: Literal["tensors", "arrays", "lists"]
) -> None:
    wanted = np.dtype(np.dtype(dtype).name)
    most: Any = np.ones(1, wanted)[0] if wanted.kind in "bf" else np.iinfo(wanted).max
    numbers = np.array([0, most, most], wanted)
    ragged = [numbers, numbers[1:]]
    batches: dict[str, tuple[RolloutColumn, list[Any]]] = {
        "numbers": (Numbers(dtype=dtype), numbers[1:].tolist()),
        "ragged": (Ragged(dtype=dtype), [row.tolist() for row in ragged]),
        "steps": (Ragged(dtype=dtype, shape=(1,)), [row[:, None].tolist() for row in ragged]),
        "inferred": (Inferred(), [row.astype(dtype) for row in ragged]),
        "scalars": (Inferred(), [torch.from_numpy(numbers)[place] for place in (0, 1)]),
    }
    bridge = RolloutBridge(shared, RolloutSchema({name: column for name, (column, _) in batches.items()}))
    bridge.put(step, {name: values for name, (_, values) in batches.items()})
    found = bridge.fetch(step, "actor", form=form, timeout_s=5)
    plain: Callable[[Any], list[Any]] = list if form == "lists" else lambda got: got.tolist()
    kind = {"tensors": torch.Tensor, "arrays": np.ndarray, "lists": list}[form]
    for got in (found["numbers"], found["scalars"], *found["ragged"], *found["steps"], *found["inferred"]):
        assert type(got) is kind
    for got in (found["numbers"], *found["ragged"], *found["steps"], *found["inferred"]):
        assert form == "lists" or str(got.dtype).removeprefix("torch.") == wanted.name
    assert plain(found["numbers"]) == numbers[1:].tolist()
    assert plain(found["scalars"]) == numbers[:2].tolist()
    for name in ("ragged", "inferred"):
        assert [plain(row) for row in found[name]] == [row.tolist() for row in ragged]
    assert [plain(row) for row in found["steps"]] == [row[:, None].tolist() for row in ragged]


@pytest.mark.parametrize("column", [
    (Numbers(dtype="bool"), np.array([0, 2])), (Numbers(dtype="float64"), [(1 << 53) + 1, 0]),
    (Numbers(dtype="float16"), [2049, 0.5]), (Ragged(dtype="int64", stored="bool"), [np.array([0, 2]), [1]]),
    (Ragged(dtype="bool"), [[0, 2], [1]]), (Ragged(dtype="float16"), [[2049, 0.5], [1]]),
    (Ragged(dtype="float64"), [np.array([(1 << 63) - 1]), np.array([0])]),
    (Ragged(dtype="float64"), [np.array([(1 << 64) - 1], np.uint64), np.array([0])]),
    (Ragged(dtype="float32", shape=(1,)), [[[(1 << 24) + 1], [0.5]], [[1.0]]]),
    (Ragged(dtype="uint64"), [np.array([-1]), np.array([0])]),
], ids=str)  # fmt: skip
def test_a_number_that_would_come_back_as_another_is_refused(shared: tq.TransferQueueClient, column: Any) -> None:
    kind, values = column
    with pytest.raises(SchemaViolation, match="field 'x'"):
        RolloutBridge(shared, RolloutSchema({"x": kind})).put("refused", {"x": values})
    assert "refused" not in shared.get_partition_list()


@pytest.mark.parametrize("column", [
    (Numbers(dtype="bool"), np.array([0, 1])), (Numbers(dtype="float64"), [1 << 60, 0.1]),
    (Ragged(dtype="float32"), [[float("inf"), 1 << 30, 0.5], np.array([1 << 40])]),
    (Ragged(dtype="int64", stored="bool"), [np.array([0, 1]), [True]]),
    (Ragged(dtype="float64"), [np.array([-(1 << 63), 1 << 62]), np.array([1 << 63], np.uint64)]),
    (Inferred(), [(1 << 53) + 1, 0.5]), (Inferred(), [[(1 << 53) + 1], [0.5]]), (Inferred(), [1 << 53, 0.5]),
], ids=str)  # fmt: skip
def test_numbers_come_back_as_they_were(shared: tq.TransferQueueClient, step: str, column: Any) -> None:
    kind, values = column
    bridge = RolloutBridge(shared, RolloutSchema({"x": kind}))
    bridge.put(step, {"x": values})
    found = bridge.fetch(step, "actor", 0, timeout_s=5)["x"]
    for got, was in zip(found, values, strict=True):
        assert np.asarray(got).tolist() == np.asarray(was).tolist()


@pytest.mark.parametrize("column", [
    "ab", b"ab", {0: 1.0, 1: 2.0}, {1.0, 2.0}, pandas.Series([1.0, 2.0], index=[1, 0]),
    np.ma.array([1.0, 2.0], mask=[False, True]),
], ids=lambda column: type(column).__name__)  # fmt: skip
@pytest.mark.parametrize("kind", [Numbers(), Objects(), Inferred()], ids=lambda kind: type(kind).__name__)
def test_what_has_no_rows_by_their_place_is_refused(
    shared: tq.TransferQueueClient, kind: RolloutColumn, column: Any
) -> None:
    with pytest.raises(SchemaViolation, match=r"field 'x': a (column is a list|masked array)"):
        RolloutBridge(shared, RolloutSchema({"x": kind})).put("refused", {"x": column})
    assert "refused" not in shared.get_partition_list()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_no_row(shared: tq.TransferQueueClient) -> None:
    row = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])
    with pytest.raises(SchemaViolation, match="row 1, field 'x'"):
        RolloutBridge(shared, RolloutSchema({"x": Ragged()})).put("refused", {"x": [[1], row]})


def test_a_masked_row_is_refused(shared: tq.TransferQueueClient) -> None:
    rows = [np.ma.array([1, 2], mask=[False, True]), np.ma.array([1], mask=[True])]
    for kind in (Ragged(), Ragged(dtype="float32")):
        with pytest.raises(SchemaViolation, match="row 0, field 'x': a masked array: fill it first"):
            RolloutBridge(shared, RolloutSchema({"x": kind})).put("refused", {"x": rows})


@pytest.mark.parametrize("size", [(), (2,)])
def test_non_tensor_data_of_one_item_for_each_row_is_a_column(
    shared: tq.TransferQueueClient, step: str, size: tuple[int, ...]
) -> None:
    bridge = RolloutBridge(shared, RolloutSchema({"x": Objects()}))
    bridge.put(step, {"x": NonTensorData(["a", "b"], batch_size=size)})
    assert bridge.fetch(step, "actor", timeout_s=5)["x"] == ["a", "b"]


def test_ints_are_inferred_as_ints_wherever_they_come_from(shared: tq.TransferQueueClient, step: str) -> None:
    columns = {"large": [1 << 63, 1], "objects": np.array([1, 2], dtype=object), "mixed": [np.uint64(1), -1]}
    bridge = RolloutBridge(shared, RolloutSchema({name: Inferred() for name in columns}))
    bridge.put(step, columns)
    found = bridge.fetch(step, "actor", timeout_s=5).columns
    assert {name: (one.dtype, one.tolist()) for name, one in found.items()} == {
        "large": (torch.uint64, [1 << 63, 1]), "objects": (torch.int64, [1, 2]), "mixed": (torch.int64, [1, -1]),
    }  # fmt: skip


def test_a_schedule_of_numpy_and_torch_reaches_ranks_as_plain_numbers(
    shared: tq.TransferQueueClient, step: str
) -> None:
    bridge = RolloutBridge(shared, RolloutSchema({"x": Numbers(dtype="int64")}))
    schedule = Schedule(
        partitions=[np.array([3, 1]), torch.tensor([0])], micro_batch_indices=[np.array([[1, 0]]), [[np.int64(0)]]],
        num_microbatches=torch.tensor([1]), global_batch_sizes=np.array([3]), dropped={2},
    )  # fmt: skip
    bridge.put(step, {"x": [10, 11, 12, 13]}, schedule=schedule)
    told = bridge.fetch(step, "actor", 0, 2, timeout_s=5).schedule
    assert repr({name: told[name] for name in ("partition", "micro_batch_indices", "num_microbatches")}) == (
        "{'partition': [3, 1], 'micro_batch_indices': [[1, 0]], 'num_microbatches': [1]}"
    )


@pytest.mark.parametrize("settings", [
    {"partitions": [[0.0, 1]]}, {"partitions": [["0", 1]]}, {"partitions": [0, 1]}, {"partitions": None},
    {"partitions": [iter([0, 1])]}, {"partitions": [[0, 1]], "num_microbatches": 1}, {"partitions": ["01"]},
    {"partitions": [[0, 1]], "micro_batch_indices": [[0, 1]]}, {"partitions": [[0, 1]], "extra": 5},
    {"partitions": [[0, 1]], "global_batch_sizes": torch.tensor(2)},
])  # fmt: skip
def test_what_is_no_schedule_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=list(settings)[-1]):
        Schedule(**settings)


@pytest.mark.parametrize("dp_size", [1.0, "1", 0])
def test_what_is_no_number_of_ranks_is_refused(shared: tq.TransferQueueClient, dp_size: Any) -> None:
    with pytest.raises(InvalidInput, match="dp_size"):
        RolloutBridge(shared, RolloutSchema({"x": Numbers()})).put("refused", {"x": [1]}, dp_size=dp_size)
