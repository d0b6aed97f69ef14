"""Rows of a field that differ in kind, rank or dtype: taken as TransferQueue 0.1.11 takes them, but never cast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

import transfer_queue as tq
from transfer_queue.client import remarks
from transfer_queue.errors import InvalidInput, SchemaConflict


@pytest.fixture
def part(shared: tq.TransferQueueClient) -> Iterator[str]:
    yield "mixed"
    shared.clear_partition("mixed")


def two(part: str, first: Any, second: Any) -> Any:
    tq.kv_put("a", part, {"x": first})
    tq.kv_put("b", part, {"x": second})
    return tq.kv_batch_get(["a", "b"], part).get("x")


ONE, SQUARE = torch.ones(2), torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [(ONE, None), (None, ONE), (ONE, "text"), (ONE, SQUARE), (SQUARE, torch.tensor(1.0)), (0.5, [1.0, 2.0]),
     (TensorDict({"t": ONE}, []), None)],
    ids=str,
)  # fmt: skip
def test_rows_of_several_kinds_come_back_as_a_list(part: str, first: Any, second: Any) -> None:
    rows = two(part, first, second).tolist()
    for got, put in zip(rows, (first, second), strict=True):
        if isinstance(put, (float, list)):
            put = torch.tensor(put)
        if isinstance(put, (torch.Tensor, TensorDict)):
            assert type(got) is type(put)
            assert bool((got == put).all())
        else:
            assert got == put
    assert isinstance(tq.kv_batch_get("a", part).get("x"), torch.Tensor) == isinstance(first, (torch.Tensor, float)), (
        "each alone is what it was"
    )


def test_rows_of_several_kinds_survive_a_checkpoint_and_many_readers(part: str, tmp_path: Any) -> None:
    two(part, torch.ones(3), None)
    tq.save_checkpoint(tmp_path / "saved")
    tq.load_checkpoint(tmp_path / "saved")
    meta = tq.get_client().get_meta(["x"], 2, part, mode="force_fetch")
    assert meta.field_schema["x"]["is_non_tensor"]
    assert [type(row) for row in tq.get_client().get_data(meta)["x"]] == [torch.Tensor, type(None)]


def test_another_dtype_is_taken_with_one_warning_and_only_a_get_of_both_raises(
    part: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remarks, "_said", {})
    tq.kv_put("a", part, {"x": ONE})
    for key in ("b", "c"):
        tq.kv_put(key, part, {"x": ONE.double()})
    assert ["float64" in record.message for record in caplog.records] == [True]
    assert tq.kv_batch_get("a", part)["x"].dtype == torch.float32
    assert tq.kv_batch_get(["b", "c"], part)["x"].dtype == torch.float64
    with pytest.raises(SchemaConflict, match=r"'x'.*float32 in row 'a'; float64 in row 'b', row 'c'"):
        tq.kv_batch_get(["a", "b", "c"], part)
    assert tq.kv_batch_get(["a", "b"], part, select_fields=["nothing"]).batch_size == (0,)


@pytest.mark.parametrize(("first", "second"), [(1, 0.5), (0.5, 1), ([1, 2], [0.5]), (torch.tensor(0.5), 1)], ids=str)
def test_pythons_ints_take_the_dtype_of_the_other_numbers(part: str, first: Any, second: Any) -> None:
    got = two(part, first, second)
    assert got.dtype == torch.float32
    assert [row.tolist() for row in got.unbind()] == [torch.as_tensor(v).float().tolist() for v in (first, second)]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("floats", "ints"),
    [
        (torch.ones(3), torch.arange(3)),
        (torch.tensor(0.5), torch.tensor(2**24)),
        (torch.ones(2, 1), torch.ones(3, 1).char()),
    ],
    ids=["columns", "numbers", "ragged"],
)
def test_integers_beside_floats_take_their_dtype_in_any_order(
    part: str, floats: torch.Tensor, ints: torch.Tensor, order: int
) -> None:
    got = two(part, *[floats, ints][::order])
    assert got.dtype == torch.float32
    assert [row.tolist() for row in got.unbind()] == [row.float().tolist() for row in [floats, ints][::order]]


def test_an_int_that_would_change_is_refused_and_so_are_tensors_of_two_floats(part: str) -> None:
    with pytest.raises(SchemaConflict, match=r"an integer of row 'b' does not fit into float32"):
        two(part, 0.5, 2**24 + 1)
    with pytest.raises(SchemaConflict, match=r"an integer of row 'b' does not fit into float16"):
        two(part, np.float16([0.5]), [-(2**63)])
    with pytest.raises(SchemaConflict, match=r"row 'b' does not fit .*float32 in row 'a'; int64 in row 'b'"):
        two(part, torch.tensor(0.5), torch.tensor(2**24 + 1))
    with pytest.raises(SchemaConflict, match=r"row 'a' does not fit .*int64 in row 'a'; float32 in row 'b'"):
        two(part, torch.tensor(2**63 - 1), torch.tensor(0.5))
    with pytest.raises(SchemaConflict, match="bool in row 'b'"):
        two(part, torch.tensor(0.5), torch.tensor(True))
    with pytest.raises(SchemaConflict, match="float64 in row 'b'"):
        two(part, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64))


def test_numbers_put_one_by_one_and_in_a_batch_are_one_column(part: str) -> None:
    tq.kv_put("a", part, {"score": 0.5, "ids": [1, 2], "array": np.arange(2.0)})
    tq.kv_batch_put(["b"], part, {"score": [0.25], "ids": [[3]], "array": [np.arange(3.0)]})
    td = tq.kv_batch_get(["a", "b"], part)
    assert td["score"].tolist() == [0.5, 0.25]
    assert [row.tolist() for row in td["ids"].unbind()] == [[1, 2], [3]]


@pytest.mark.parametrize(
    "column",
    [np.array(["a", "bc"]), np.array([b"a", b"bc"]), np.array([{"a": [1]}, None], object),
     np.array(["2024-01-01", "NaT"], "M8[s]"), ["a", "b"], ("a", "b"), NonTensorData(["a", {"b": 1}], batch_size=[2]),
     NonTensorData(("a", "b"), batch_size=[2])],
    ids=repr,
)  # fmt: skip
def test_data_of_one_item_per_row_is_a_column(part: str, column: Any) -> None:
    wanted = list(column.data if isinstance(column, NonTensorData) else column)
    tq.kv_batch_put(["a", "b"], part, TensorDict({"x": column}, batch_size=2))
    for keys, rows in ((["a", "b"], wanted), (["b"], wanted[1:])):
        got = tq.kv_batch_get(keys, part).get("x").tolist()
        assert str(got) == str(rows) or [str(row) for row in got] == [str(row) for row in rows]


@pytest.mark.parametrize(
    "rows",
    [[ONE, ONE + 1], [torch.tensor(1), torch.tensor(2)], [ONE, torch.ones(3)], [SQUARE, torch.ones(1, 3)]],
    ids=str,
)
def test_rows_that_are_tensors_are_a_tensor_whatever_lay_beside_them(part: str, rows: list[torch.Tensor]) -> None:
    tq.kv_batch_put(["a", "b", "c"], part, {"x": [rows[0], None, rows[1]]})
    tq.kv_put("d", part, {"x": rows[1]})
    for keys in (["a", "c"], ["d", "a"]):
        got = tq.kv_batch_get(keys, part)["x"]
        want = rows if keys[0] == "a" else rows[::-1]
        assert isinstance(got, torch.Tensor)
        assert all(torch.equal(one, other) for one, other in zip(got.unbind(), want, strict=True))
        got.unbind()[0].add_(1)
        assert torch.equal(tq.kv_batch_get(keys, part)["x"].unbind()[0], want[0]), "what was read is the reader's own"


def test_other_data_is_one_value_for_all_rows(part: str) -> None:
    for number, value in enumerate(("ab", ["a", "b", "c"], {"a": 1, "b": 2}, None)):
        tq.kv_batch_put(["a", "b"], f"{part}{number}", TensorDict({"x": NonTensorData(value, batch_size=[2])}, [2]))
        assert tq.kv_batch_get(["a", "b"], f"{part}{number}").get("x").tolist() == [value, value]
        tq.kv_clear(["a", "b"], f"{part}{number}")


@pytest.mark.parametrize("beside", [{"t": torch.zeros(3)}, {}], ids=["tensor", "alone"])
@pytest.mark.parametrize("data", [["a", "b", {"c": 1}], ("a", "b", "c"), np.array(["a", "b", "c"])], ids=str)
def test_wrapped_data_without_a_batch_size_is_a_column_too(part: str, data: Any, beside: dict[str, Any]) -> None:
    tq.kv_batch_put(["0", "1", "2"], part, {"x": NonTensorData(data), **beside, "one": NonTensorData("abc")})
    td = tq.kv_batch_get(["2", "0", "1"], part)
    assert list(td["x"]) == [data[2], data[0], data[1]]
    assert list(td["one"]) == ["abc"] * 3


def test_wrapped_data_without_a_batch_size_is_spread_over_partitions(shared: tq.TransferQueueClient, part: str) -> None:
    metas = [shared.put({"t": torch.zeros(2)}, partition_id=p) for p in (part, part + "2")]
    both = tq.BatchMeta.concat(metas).select_samples([0, 2, 1, 3])
    shared.put({"x": NonTensorData(["a", "b", "c", "d"]), "one": NonTensorData("abcd")}, metadata=both)
    assert list(shared.get_data(both)["x"]) == ["a", "b", "c", "d"]
    assert list(shared.get_data(both)["one"]) == ["abcd"] * 4
    values = {"x": NonTensorData(["e", "f", "g", "h"]), "one": NonTensorData("wxyz")}
    shared.update(both, ["x", "one"], values=values, parser="replace")
    assert list(shared.get_data(both)["x"]) == ["e", "f", "g", "h"]
    assert list(shared.get_data(both)["one"]) == ["wxyz"] * 4


def test_a_parser_may_leave_one_value_for_all_rows(part: str) -> None:
    fields = {"x": torch.zeros(2), "one": NonTensorData("a")}
    tq.kv_batch_put(["0", "1"], part, fields, data_parser=lambda columns: columns)
    assert list(tq.kv_batch_get(["0", "1"], part)["one"]) == ["a", "a"]


def test_values_for_all_rows_alone_do_not_say_how_many_there_are(part: str) -> None:
    with pytest.raises(InvalidInput, match="says how many"):
        tq.kv_batch_put(["0", "1"], part, {"one": NonTensorData("a")})


def test_an_object_column_takes_room_for_its_rows_once(part: str, shared: tq.TransferQueueClient) -> None:
    logs = np.empty(64, object)
    logs[:] = [[{"role": "user", "content": f"{n:04}" * 500}] for n in range(64)]
    before = shared.stats()["arena_nbytes_used"]
    tq.kv_batch_put([str(n) for n in range(64)], part, TensorDict({"message_log": logs}, batch_size=64))
    assert shared.stats()["arena_nbytes_used"] - before < 4 * 64 * 2000
    assert tq.kv_batch_get("7", part)["message_log"][0] == logs[7]


def test_out_needs_rows_of_one_kind(part: str, shared: tq.TransferQueueClient) -> None:
    two(part, ONE, None)
    meta = shared.get_meta(["x"], 2, part, mode="force_fetch")
    with pytest.raises(InvalidInput, match="several kinds"):
        shared.get_data(meta, out={"x": torch.zeros(2, 2)})


@pytest.mark.parametrize("column", [np.array(["w", "x", "y", "z"]), np.arange(4.0), ["w", "x", "y", "z"]], ids=str)
@pytest.mark.parametrize("mapping", [True, False], ids=["mapping", "TensorDict"])
def test_a_column_over_two_partitions_gives_each_row_its_own_item(
    shared: tq.TransferQueueClient, column: Any, mapping: bool
) -> None:
    parts = [shared.put({"n": torch.arange(2)}, partition_id=f"over{number}") for number in range(2)]
    meta = tq.BatchMeta.concat(parts)
    shared.put({"s": column} if mapping else TensorDict({"s": column}, batch_size=4), metadata=meta)
    got = shared.get_data(meta.select_fields(["s"]))["s"]
    assert isinstance(got, torch.Tensor) == (np.asarray(column).dtype.kind == "f")
    assert list(got) == list(column)
    for number in range(2):
        shared.clear_partition(f"over{number}")


def test_an_update_gives_each_row_its_own_item(part: str, shared: tq.TransferQueueClient) -> None:
    meta = shared.put({"s": ["a", "b"]}, partition_id=part)
    shared.update(meta, ["s"], TensorDict({"s": np.array(["p", "q"])}, batch_size=2), parser="replace")
    assert list(shared.get_data(meta)["s"]) == ["p", "q"]


@pytest.mark.parametrize(
    ("keys", "ragged"), [("a", 1), ("ad", 1), ("ab", 2), ("bc", 1), ("ae", 3), ("ac", None)], ids=str
)
def test_some_rows_of_a_column_that_differ_in_fewer_dimensions_are_jagged(
    part: str, keys: str, ragged: int | None
) -> None:
    """As when they were put alone: programs ask for `offsets()` of whatever they read."""
    shapes = {"a": (3, 2, 2), "b": (3, 4, 2), "c": (1, 4, 5), "d": (3, 2, 2), "e": (3, 2, 7)}
    rows = {key: torch.rand(shape) for key, shape in shapes.items()}
    rows["c"] = torch.rand(1, 4, 2) if keys == "bc" else rows["c"]
    tq.kv_batch_put(list(rows), part, {"x": list(rows.values())})
    got = tq.kv_batch_get(list(keys), part)["x"]
    assert got.layout == (torch.strided if ragged is None else torch.jagged)
    assert ragged is None or (got._ragged_idx == ragged and len(got.offsets()) == len(keys) + 1)
    assert all(torch.equal(one, rows[key]) for one, key in zip(got.unbind(), keys, strict=True))
    if len({rows[key].shape for key in keys}) == 1:
        assert tq.kv_batch_get(list(keys), part, dense=True)["x"].shape == (len(keys), 3, 2, 2)


def test_a_jagged_row_beside_one_of_other_width_is_jagged_in_that_dimension(part: str) -> None:
    tq.kv_put("a", part, {"x": torch.rand(4, 3)})
    tq.kv_batch_put(["b", "c"], part, {"x": [torch.rand(4, 1), torch.rand(2, 1)]})
    assert tq.kv_batch_get(["b", "a"], part)["x"]._ragged_idx == 2
    assert tq.kv_batch_get(["b", "c"], part)["x"]._ragged_idx == 1
    assert tq.kv_batch_get(["a", "c"], part)["x"].layout == torch.strided
