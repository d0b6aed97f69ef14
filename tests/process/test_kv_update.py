"""kv_update and kv_empty: atomic changes of cells by what they hold, in all call forms."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Child
from tables import Box, schema
from tensordict import NonTensorData, NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue.client.operations import update
from transfer_queue.errors import CellsChanged, InvalidInput, UnsupportedValue
from transfer_queue.wire import messages as m

Spawn = Callable[[str], Child]


def concat(old: Any, new: Any) -> Any:
    return new if old is None else torch.cat([old, new])


def cell(key: str, partition: str, field: str) -> Any:
    return update.rows_of(tq.kv_batch_get(key, partition, select_fields=field).get(field))[0]


# the controller


def test_a_commit_that_expects_other_blocks_is_refused_and_changes_nothing() -> None:
    box = Box()
    box.put(["k"], ["a", "b"])
    first = box.last_block
    box.put(["k"], ["a"])
    block = box.last_block

    def commit(*blocks: int, keys: Any = ("k",), tags: Any = None) -> Any:
        expected = b"".join(number.to_bytes(8, "little") for number in blocks)
        fields = [schema(name) for name in "ab"][: len(blocks)]
        number = next(box.numbers)
        return box.handle(m.Commit(number, "p", len(keys), list(keys), None, fields, number, b"", tags, 0.0,
                                   expected=expected))  # fmt: skip

    for wrong in ((first, first), (block, 0), (block, block)):
        with pytest.raises(CellsChanged):
            commit(*wrong, tags=[{"late": True}])
    with pytest.raises(CellsChanged):
        commit(0, keys=("unknown",))
    assert box.cells(["k"]) == {"a": [(block, 0)], "b": [(first, 0)]}
    assert commit(block, first).fields == ["a", "b"]
    with pytest.raises(InvalidInput):
        commit(1, 2, keys=("k", "l"))


# one cell, in the calls of both revisions


def test_tokens_are_appended_to_the_field_they_belong_to(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "concat", fields={"ids": torch.tensor([10, 11, 12])}, tag={"step": 1})
    meta = tq.kv_update(key="k", partition_id="concat", fields="ids", values=torch.tensor([20, 21]), parser=concat)
    assert (meta.keys, meta.fields, meta.tags) == (["k"], ["ids"], [{"step": 1}])
    got = tq.kv_batch_get("k", "concat")
    assert list(got.keys()) == ["ids"]
    assert got["ids"][0].tolist() == [10, 11, 12, 20, 21]


def test_a_dict_of_fields_is_the_other_call_form(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "dict", fields={"ids": torch.tensor([1]), "meta": {"a": 1}})

    def merge(old: Any, new: Any) -> Any:
        return concat(old, new) if isinstance(old, torch.Tensor) else {**old, **new}

    tq.kv_update("k", "dict", {"ids": torch.tensor([2]), "meta": {"b": 2}}, parser=merge)
    tq.kv_update("k", "dict", {"ids": torch.tensor([3])}, merge=merge)
    tq.kv_update("k", "dict", TensorDict({"ids": torch.tensor([[4]])}, batch_size=1), merge=merge)
    assert cell("k", "dict", "ids").tolist() == [1, 2, 3, 4]
    assert cell("k", "dict", "meta") == {"a": 1, "b": 2}


def test_a_field_that_was_never_written_has_the_old_value_none(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "fresh", fields={"anchor": torch.tensor([1])})
    tq.kv_put("bare", "fresh", tag={"a": 1})
    seen = []

    def report(old: Any, new: Any) -> Any:
        seen.append(old)
        return {"new": new.tolist()}

    for key in ("k", "bare"):
        tq.kv_update(key, "fresh", "logprobs", values=torch.tensor([7, 8]), parser=report)
        assert cell(key, "fresh", "logprobs") == {"new": [7, 8]}
    assert seen == [None, None]
    with pytest.raises(ValueError, match="unproduced field"):
        tq.kv_update("k", "fresh", {"other": torch.tensor([1])}, parser=concat)


def test_several_fields_change_together(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "several", fields={"a": torch.tensor([1, 2]), "b": torch.tensor([10])})
    new = {"a": torch.tensor([3]), "b": torch.tensor([20, 30])}
    tq.kv_update("k", "several", ["a", "b"], values=new, parser=concat)
    tq.kv_update("k", "several", ["b"], values=TensorDict({"b": torch.tensor([[40]])}, batch_size=1), parser=concat)
    assert cell("k", "several", "a").tolist() == [1, 2, 3]
    assert cell("k", "several", "b").tolist() == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("held", "parser", "new"),
    [
        (0, "add", 0.5), (3, "max", 2.9), (0, "add", float("nan")), (0, "add", 2**63), (0, "add", 1e300),
        (torch.tensor(100, dtype=torch.int8), "add", 300), (torch.tensor(100, dtype=torch.int8), "add", 28),
        (torch.tensor(200, dtype=torch.uint8), "add", 56), (torch.tensor(200, dtype=torch.uint8), "add", -1),
        (torch.tensor(2**62), "add", 2**62), (torch.tensor(True), "add", 1), (torch.tensor(False), "max", 2),
        (torch.tensor(1.0), "add", 2**24 + 1), (torch.tensor(1.0), "add", 1e39), (torch.tensor(3e38), "add", 3e38),
        (torch.tensor(1.0), "add", torch.tensor(0.1, dtype=torch.float64)), (torch.tensor(1.0), "add", 1j),
        (torch.tensor([1.0, 2.0]), "add", [0.1, 2**24 + 1]), (torch.tensor([1.0]), "max", np.array([0.1])),
        (torch.tensor([1]), "max", [1.5]),
        (torch.tensor([1.0, 2.0], dtype=torch.float64), "add", [0.1, 2**53 + 1]),
        (torch.tensor([1.0, 2.0]), "add", [[1.0], [2.0, 3.0]]),
        (torch.tensor([1]), "append", torch.tensor([1.5])), (torch.tensor([1]), "append", torch.tensor([float("inf")])),
        (torch.tensor([1], dtype=torch.int8), "append", torch.tensor([200], dtype=torch.uint8)),
    ],
)  # fmt: skip
def test_a_number_that_the_dtype_of_a_field_has_not_is_refused(
    shared: tq.TransferQueueClient, held: Any, parser: str, new: Any
) -> None:
    tq.kv_put("k", "inexact", fields={"x": held})
    with pytest.raises(UnsupportedValue, match=str(torch.as_tensor(held).dtype)):
        tq.kv_update("k", "inexact", "x", values=new, parser=parser)
    assert torch.equal(torch.as_tensor(cell("k", "inexact", "x")), torch.as_tensor(held))
    shared.clear_partition("inexact")


@pytest.mark.parametrize(
    ("held", "parser", "new", "result"),
    [
        (1, "add", 2.0, torch.tensor(3)), (1, "add", True, torch.tensor(2)),
        (torch.tensor(1.0), "add", 0.1, torch.tensor(1.1)),
        (torch.tensor(1.0), "add", np.mean([0.1, 0.3]), torch.tensor(1.2)),
        (torch.tensor([1.0, 2.0]), "add", [0.1, 0.2], torch.tensor([1.1, 2.2])),
        (torch.tensor([1.0, 2.0]), "max", (0.1, 3.3), torch.tensor([1.0, 3.3])),
        (torch.tensor([[1.0, 2.0]]), "add", [[0.1, 2]], torch.tensor([[1.1, 4.0]])),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "max", [1.1, float("inf")],
         torch.tensor([1.1, float("inf")], dtype=torch.bfloat16)),
        (torch.tensor(1.0), "add", float("inf"), torch.tensor(float("inf"))),
        (torch.tensor(1.0, dtype=torch.bfloat16), "add", torch.tensor(2.0, dtype=torch.float64),
         torch.tensor(3.0, dtype=torch.bfloat16)),
        (torch.tensor([1], dtype=torch.int8), "append", torch.tensor([-128, 127]),
         torch.tensor([1, -128, 127], dtype=torch.int8)),
        (torch.tensor([0.5]), "append", torch.tensor([2**24]), torch.tensor([0.5, 2.0**24])),
        (torch.tensor(-(2**62)), "add", -(2**62), torch.tensor(-(2**63))),
    ],
)  # fmt: skip
def test_a_number_of_another_dtype_that_the_field_has_is_taken(
    shared: tq.TransferQueueClient, held: Any, parser: str, new: Any, result: torch.Tensor
) -> None:
    tq.kv_put("k", "exact", fields={"x": held})
    tq.kv_update("k", "exact", "x", values=new, parser=parser)
    found = cell("k", "exact", "x")
    assert (found.dtype, torch.equal(found, result)) == (result.dtype, True)
    shared.clear_partition("exact")


def test_lists_of_floats_are_rounded_to_tensors_in_dicts(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "dicts", fields={"x": {"a": torch.tensor([1.0, 2.0])}})
    tq.kv_update("k", "dicts", "x", values={"a": [0.1, 0.2]}, parser="add")
    assert torch.equal(cell("k", "dicts", "x")["a"], torch.tensor([1.1, 2.2]))
    shared.clear_partition("dicts")


@pytest.mark.parametrize(
    ("held", "new", "said"),
    [
        (torch.tensor(1.0), torch.tensor(0.1, dtype=torch.float64), r"torch\.tensor\(\.\.\., dtype=torch\.float32\)"),
        (torch.tensor(1.0, dtype=torch.float16), 70000.0, r"overflow torch\.float16"),
        (torch.tensor([1.0]).half(), [70000.0], r"overflow torch\.float16"),
        (torch.tensor(6e4, dtype=torch.float16), 6e4, "torch.float16, which has not the sum: it overflows"),
    ],
)
def test_a_refused_number_is_told_what_to_do(
    shared: tq.TransferQueueClient, held: torch.Tensor, new: Any, said: str
) -> None:
    tq.kv_put("k", "told", fields={"x": held})
    with pytest.raises(UnsupportedValue, match=said):
        tq.kv_update("k", "told", "x", values=new, parser="add")
    shared.clear_partition("told")


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("append", torch.tensor([1, 2]), torch.tensor([3]), [1, 2, 3]), ("append", [1, 2], [3], [1, 2, 3]),
        ("append", [1, 2], np.array([3, 4]), [1, 2, 3, 4]), ("append", [[1, 2]], 3, [[1, 2], 3]),
        ("append", torch.tensor([[1, 2]]), torch.tensor([3, 4]), [[1, 2], [3, 4]]), ("append", [1, 2], 3, [1, 2, 3]),
        ("append", [1, "a"], ["b"], [1, "a", "b"]), ("append", [{"turn": 1}], {"turn": 2}, [{"turn": 1}, {"turn": 2}]),
        ("append", "one ", "two", "one two"), ("merge", {"a": 1, "b": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ("add", torch.tensor([1, 2]), torch.tensor([3, 4]), [4, 6]), ("add", torch.tensor([1, 2]), 2, [3, 4]),
        ("add", {"n": 1}, {"n": 2, "m": 5}, {"n": 3, "m": 5}),
        ("max", torch.tensor([1, 5]), torch.tensor([3, 4]), [3, 5]), ("max", {"r": 0.5}, {"r": 0.25}, {"r": 0.5}),
        ("replace", torch.tensor([1, 2]), torch.tensor([3]), [3]), ("replace", {"a": 1}, {"b": 2}, {"b": 2}),
    ],
)  # fmt: skip
def test_parsers_have_names(
    shared: tq.TransferQueueClient, request: pytest.FixtureRequest, name: str, old: Any, new: Any, expected: Any
) -> None:
    partition = request.node.name
    tq.kv_put("k", partition, fields={"x": old})
    tq.kv_put("first", partition, fields={"other": torch.ones(1)})
    tq.kv_update("k", partition, "x", values=new, parser=name)
    found = cell("k", partition, "x")
    assert (found.tolist() if isinstance(found, torch.Tensor) else found) == expected
    if isinstance(new, torch.Tensor):
        tq.kv_update("first", partition, "x", values=new, parser=name)
        assert torch.equal(cell("first", partition, "x"), new)


@pytest.mark.parametrize(("old", "new"), [(1.0, float("nan")), (float("nan"), 1.0)])
def test_the_maximum_with_nan_is_nan_in_dicts_as_in_tensors(
    shared: tq.TransferQueueClient, old: float, new: float
) -> None:
    tq.kv_put("k", "nans", fields={"d": {"r": old}, "t": torch.tensor([old])})
    tq.kv_update("k", "nans", {"d": {"r": new}, "t": torch.tensor([new])}, merge="max")
    assert np.isnan([cell("k", "nans", "d")["r"], cell("k", "nans", "t").item()]).all()


def test_a_refusal_names_its_parser_once(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "once", fields={"x": {"a": 1}})
    with pytest.raises(UnsupportedValue, match=r"^append: int to dict$"):
        tq.kv_update("k", "once", "x", values=3, parser="append")


def test_values_that_a_named_parser_cannot_take_are_a_type_error(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "unfit", fields={"x": torch.tensor([1]), "o": {"a": 1}})
    for name, values in (
        ("merge", torch.tensor([1])),
        ("append", "text"),
        ("append", torch.ones(2, 3, dtype=torch.int64)),
    ):
        with pytest.raises(TypeError, match=name):
            tq.kv_update("k", "unfit", "x", values=values, parser=name)
    with pytest.raises(TypeError, match="add"):
        tq.kv_update("k", "unfit", "o", values=3, parser="add")


# what goes wrong


def test_a_parser_that_fails_leaves_the_row_unchanged(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "atomic", fields={"a": torch.tensor([1]), "b": torch.tensor([2])})

    def boom(old: Any, new: Any) -> Any:
        if old.tolist() == [2]:
            raise KeyError("parser failed on purpose")
        return new

    with pytest.raises(KeyError, match="on purpose"):
        tq.kv_update("k", "atomic", ["a", "b"], values={"a": torch.tensor([4]), "b": torch.tensor([4])}, parser=boom)
    assert cell("k", "atomic", "a").tolist() == [1]


def test_a_result_that_cannot_be_stored_leaves_the_row_unchanged(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "unstorable", fields={"a": {"x": 1}})
    with pytest.raises(TypeError):
        tq.kv_update("k", "unstorable", "a", values=1, parser=lambda old, new: object())
    assert cell("k", "unstorable", "a") == {"x": 1}


def test_the_dict_form_keeps_the_type_of_a_cell(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "typed", fields={"t": torch.tensor([1]), "o": {"a": 1}})
    with pytest.raises(TypeError, match="keep dtype"):
        tq.kv_update("k", "typed", {"t": torch.tensor([1])}, parser=lambda old, new: old.float())
    with pytest.raises(TypeError, match="keep dtype"):
        tq.kv_update("k", "typed", {"t": torch.tensor([1])}, parser=lambda old, new: {"no": "tensor"})
    with pytest.raises(TypeError, match="must remain non-tensor"):
        tq.kv_update("k", "typed", {"o": {"a": 2}}, parser=lambda old, new: torch.tensor([2]))


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, "must not specify values", {"fields": "x", "values": torch.tensor([1]), "empty": True}),
        (ValueError, "must not specify parser", {"fields": "x", "parser": concat, "empty": True}),
        (TypeError, "parser must be callable", {"fields": "x", "values": torch.tensor([1])}),
        (ValueError, "requires values", {"fields": "x", "parser": concat}),
        (ValueError, "same columns", {"fields": ["x", "y"], "values": {"x": 1}, "parser": concat}),
        (ValueError, "expected a function", {"fields": "x", "values": 1, "parser": "concat"}),
        (ValueError, "not found", {"key": "never", "fields": "x", "values": torch.tensor([1]), "parser": concat}),
        (ValueError, "not found", {"partition_id": "never", "fields": "x", "values": 1, "parser": concat}),
        (TypeError, "at least one field", {"fields": {}, "parser": concat}),
        (TypeError, "names are strings", {"fields": {"x": 1, 2: "bad"}, "parser": concat}),
        (TypeError, "empty", {"fields": [], "parser": concat}),
        (TypeError, "keys", {"key": 3, "fields": "x", "values": 1, "parser": concat}),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(
    shared: tq.TransferQueueClient, error: Any, match: str, arguments: Any
) -> None:
    tq.kv_put("k", "refused", fields={"x": torch.tensor([1])})
    with pytest.raises(error, match=match):
        tq.kv_update(**{"key": "k", "partition_id": "refused", **arguments})
    assert cell("k", "refused", "x").tolist() == [1]
    assert list(tq.kv_list("refused")["refused"]) == ["k"]


# None


def test_an_emptied_cell_is_none_and_counts_as_written(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "empty", fields={"o": {"a": 1}, "x": torch.tensor([1])}, tag={"t": 1})
    tq.kv_empty(key="k", partition_id="empty", fields="o")
    assert cell("k", "empty", "o") is None
    assert cell("k", "empty", "x").tolist() == [1]
    assert tq.kv_list("empty") == {"empty": {"k": {"t": 1}}}
    assert shared.check_production_status(["o"], "empty")
    tq.kv_put("k", "empty", fields={"o": {"a": 2}})
    asyncio.run(tq.async_kv_update("k", "empty", ["o"], empty=True))
    assert cell("k", "empty", "o") is None
    with pytest.raises(ValueError, match="not found"):
        tq.kv_empty("never", "empty", "o")


# many rows


def test_rows_of_metadata_are_updated_one_by_one(shared: tq.TransferQueueClient) -> None:
    keys = [f"k{n}" for n in range(8)]
    for number, key in enumerate(keys):
        tq.kv_put(key, "rows", fields={"ids": torch.ones(number + 1, dtype=torch.int64)})
    meta = shared.kv_retrieve_meta(keys, "rows")
    values = TensorDict({"ids": torch.full((8, 1), 9)}, batch_size=[8])
    assert shared.update(meta, ["ids"], values=values, parser=concat) is meta
    rows = tq.kv_batch_get(keys, "rows")["ids"].unbind()
    assert [row.tolist() for row in rows] == [[1] * (n + 1) + [9] for n in range(8)]
    asyncio.run(
        shared.async_update(meta, "ids", values={"ids": [torch.tensor([n]) for n in range(8)]}, parser="append")
    )
    assert [row[-1].item() for row in tq.kv_batch_get(keys, "rows")["ids"].unbind()] == list(range(8))


def test_rows_that_lack_a_field_are_updated_with_the_others(shared: tq.TransferQueueClient) -> None:
    meta = shared.put({"a": torch.arange(4).view(4, 1)}, partition_id="holes")
    shared.put({"b": torch.tensor([[10], [30]])}, metadata=meta.select_samples([1, 3]))
    values = {"b": torch.tensor([[0], [1], [2], [3]])}
    shared.update(meta, ["b"], values=values, parser=concat)
    found = shared.get_data(meta.select_fields(["b"]))["b"].unbind()
    assert [row.tolist() for row in found] == [[0], [10, 1], [2], [30, 3]]


def test_updates_that_do_not_fit_their_metadata_are_refused(shared: tq.TransferQueueClient) -> None:
    meta = shared.put({"a": torch.arange(2).view(2, 1)}, partition_id="unfitting")
    with pytest.raises(RuntimeError, match="3 rows of values for 2"):
        shared.update(meta, ["a"], values={"a": torch.zeros(3, 1)}, parser=concat)
    with pytest.raises(ValueError, match="same columns"):
        shared.update(meta, ["a"], values={"b": torch.zeros(2, 1)}, parser=concat)
    shared.clear_samples(meta)
    with pytest.raises(tq.StorageKeyNotFoundError):
        shared.update(meta, ["a"], values={"a": torch.zeros(2, 1)}, parser=concat)


# others at the same time


def test_a_write_in_between_makes_the_parser_run_again(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "between", fields={"x": torch.tensor([1])})
    seen = []

    def slow(old: Any, new: Any) -> Any:
        seen.append(old.tolist())
        if len(seen) == 1:
            tq.kv_put("k", "between", fields={"x": torch.tensor([5])})
        return old + new

    tq.kv_update("k", "between", "x", values=torch.tensor([1]), parser=slow)
    assert seen == [[1], [5]]
    assert cell("k", "between", "x").tolist() == [6]


def test_a_key_that_is_cleared_in_between_is_not_made_again(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("stays", "cleared", fields={"x": torch.tensor([1])})
    tq.kv_put("k", "cleared", fields={"x": torch.tensor([1])})

    def clear(old: Any, new: Any) -> Any:
        tq.kv_clear("k", "cleared")
        return new

    with pytest.raises(ValueError, match="not found"):
        tq.kv_update("k", "cleared", "x", values=torch.tensor([1]), parser=clear)
    assert list(tq.kv_list("cleared")["cleared"]) == ["stays"]


def test_large_cells_are_updated_through_the_arena(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "large", fields={"x": torch.zeros(100_000)})
    for _ in range(3):
        tq.kv_update("k", "large", "x", values=torch.ones(100_000), parser="add")
    assert cell("k", "large", "x").sum().item() == 300_000


def test_threads_and_tasks_lose_no_update(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("k", "threads", fields={"x": torch.tensor([0]), "log": []})

    async def tasks() -> None:
        await asyncio.gather(
            *(tq.async_kv_update("k", "threads", "log", values=[n], parser="append") for n in range(8))
        )

    def count() -> None:
        for _ in range(8):
            tq.kv_update("k", "threads", "x", values=1, parser="add")

    threads = [threading.Thread(target=count) for _ in range(3)]
    threads.append(threading.Thread(target=asyncio.run, args=(tasks(),)))
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert cell("k", "threads", "x").tolist() == [24]
    assert sorted(cell("k", "threads", "log")) == list(range(8))


def test_three_processes_lose_no_increment(shared: tq.TransferQueueClient, child: Spawn) -> None:
    tq.kv_put("k", "processes", fields={"x": torch.tensor([0])})
    code = """
        import torch, transfer_queue as tq
        tq.init()
        for _ in range(20):
            tq.kv_update("k", "processes", "x", values=torch.tensor([1]), parser=lambda old, new: old + new)
    """
    for one in [child(code) for _ in range(3)]:
        one.finish(100)
    assert cell("k", "processes", "x").tolist() == [60]


def test_an_emptied_cell_is_none_beside_rows_of_tensors(shared: tq.TransferQueueClient) -> None:
    tq.kv_put("a", "emptied", {"x": torch.ones(3)})
    tq.kv_put("b", "emptied", {"x": torch.ones(2)})
    tq.kv_empty("a", "emptied", "x")
    first, second = tq.kv_batch_get(["a", "b"], "emptied", ["x"])["x"]
    assert first is None
    assert second.tolist() == [1, 1]


def test_a_dict_may_replace_a_tensor(shared: tq.TransferQueueClient) -> None:
    shared.clear_partition("emptied")
    tq.kv_put("a", "emptied", {"x": torch.ones(3)})
    tq.kv_update("a", "emptied", "x", values={"sum": 3}, parser=lambda old, new: {**new, "was": old.tolist()})
    assert list(tq.kv_batch_get("a", "emptied")["x"]) == [{"sum": 3, "was": [1, 1, 1]}]


def test_an_array_in_a_field_of_tensors_is_a_tensor_and_among_objects_an_array(shared: tq.TransferQueueClient) -> None:
    part = "arrays"
    tq.kv_put("k", part, {"x": np.array([1.0, 2.0]), "o": np.array(["a", "b"])})
    tq.kv_update("k", part, "x", np.array([3.0]), parser="replace")
    tq.kv_update("k", part, "new", 2.0, parser=lambda old, new: np.array(new))
    tq.kv_update("k", part, {"x": 4.0}, merge=lambda old, new: old.numpy() * new)
    tq.kv_update("k", part, "o", np.array([1, 2]), parser="replace")
    row = tq.kv_batch_get("k", part)
    assert (row["x"][0].tolist(), row["new"].tolist()) == ([12.0], [2.0])
    assert type(row.get("o").tolist()[0]) is np.ndarray
    meta = shared.put({"x": np.array([1.0, 2.0])}, partition_id=part)
    shared.update(meta, "x", {"x": np.array([3.0, 4.0])}, "replace")
    assert torch.equal(shared.get_data(meta)["x"], torch.tensor([3.0, 4.0], dtype=torch.float64))
    shared.clear_partition(part)


def test_a_list_beside_tensors_stays_a_list(shared: tq.TransferQueueClient) -> None:
    part = "list beside tensors"
    tq.kv_put("tensor", part, {"f": torch.zeros(2)})
    tq.kv_batch_put(["list"], part, fields=TensorDict({"f": NonTensorStack(NonTensorData([1, 2]))}, [1]))
    tq.kv_update("list", part, "f", [3], parser="append")
    assert tq.kv_batch_get("list", part)["f"].tolist() == [[1, 2, 3]]
    shared.clear_partition(part)


def test_a_wrapped_value_is_what_it_wraps(shared: tq.TransferQueueClient) -> None:
    part = "wrapped"
    tq.kv_put("k", part, {"f": {"a": 1}})
    tq.kv_update("k", part, "f", NonTensorData({"b": 2}), parser="merge")
    tq.kv_update("k", part, {"f": NonTensorData({"c": 3})}, merge=lambda old, new: {**old, **new})
    tq.kv_update("k", part, ["f"], {"f": NonTensorData({"d": 4})}, parser="merge")
    meta = tq.get_client().kv_retrieve_meta("k", part)
    shared.update(meta, ["f"], {"f": [NonTensorData({"e": 5})]}, lambda old, new: {**old, **new})
    assert tq.kv_batch_get("k", part)["f"][0] == {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}
    shared.clear_partition(part)
