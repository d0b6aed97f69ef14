"""The key-value interface: what callers of `kv_*` and `async_kv_*` see."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue.errors import CallerError, InvalidInput, NotReady, SchemaConflict, UnknownRows, UnsupportedValue

pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture
def part(request: pytest.FixtureRequest) -> Iterator[str]:
    """A partition of the test's own."""
    yield request.node.name
    tq.get_client().clear_partition(request.node.name)


def batch(n: int, **columns: Any) -> TensorDict:
    return TensorDict(columns, batch_size=[n])


def is_jagged(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested and value.layout == torch.jagged


def test_put_returns_merged_tags_in_key_order_also_without_tags(part: str) -> None:
    tq.kv_batch_put(["a", "b", "c"], part, batch(3, x=torch.zeros(3)), tags=[{"n": 1}, {"n": 2}, {"n": 3}])
    meta = tq.kv_batch_put(["c", "a"], part, batch(2, y=torch.zeros(2)))
    assert (meta.keys, meta.tags) == (["c", "a"], [{"n": 3}, {"n": 1}])
    assert meta.partition_id == part
    assert meta.extra_info == {}


def test_numbers_of_numpy_in_tags_are_those_of_python(part: str) -> None:
    tag = {"n": np.int64(5), "r": np.float32(0.5), "is_done": np.bool_(True), "most": np.uint64(2**64 - 1)}
    (stored,) = tq.kv_put("a", part, {"x": torch.ones(2)}, tag=tag).tags
    assert stored == {"n": 5, "r": 0.5, "is_done": True, "most": 2**64 - 1}
    assert list(map(type, stored.values())) == [int, float, bool, int]
    with pytest.raises(UnsupportedValue, match=r"'t'.*\.item\(\)"):
        tq.kv_put("a", part, tag={"t": torch.tensor(5)})


def test_tags_merge_by_name(part: str) -> None:
    tq.kv_put("a", part, {"x": torch.ones(2)}, tag={"old": 1, "both": 1})
    meta = tq.kv_put("a", part, tag={"new": 2, "both": 2})
    assert meta.tags == [{"old": 1, "both": 2, "new": 2}]
    assert tq.kv_list(part) == {part: {"a": {"old": 1, "both": 2, "new": 2}}}


def test_put_returns_the_sorted_fields_common_to_its_keys(part: str) -> None:
    tq.kv_batch_put(["a", "b"], part, batch(2, z=torch.zeros(2)))
    assert tq.kv_put("a", part, {"m": torch.zeros(1), "b": "s"}).fields == ["b", "m", "z"]
    assert tq.kv_batch_put(["a", "b"], part, batch(2, k=torch.zeros(2))).fields == ["k", "z"]
    assert tq.kv_batch_put(["new", "a"], part, tags=[{}, {}]).fields == []


def test_upsert_adds_and_overwrites_fields(part: str) -> None:
    tq.kv_put("a", part, {"x": torch.tensor([1.0]), "y": torch.tensor([2.0])})
    tq.kv_put("a", part, {"y": torch.tensor([3.0, 4.0]), "z": torch.tensor(5)})
    td = tq.kv_batch_get("a", part)
    assert td["x"].unbind()[0].tolist() == [1.0]
    assert td["y"].unbind()[0].tolist() == [3.0, 4.0]
    assert td["z"].tolist() == [5]


def test_uniform_rows_come_back_jagged_with_offsets(part: str) -> None:
    x = torch.arange(12, dtype=torch.float32).view(4, 3)
    tq.kv_batch_put(["a", "b", "c", "d"], part, batch(4, x=x))
    got = tq.kv_batch_get(["a", "b", "c", "d"], part)["x"]
    assert is_jagged(got)
    assert got.offsets().tolist() == [0, 3, 6, 9, 12]
    assert torch.equal(torch.stack(list(got.unbind())), x)


def test_ragged_rows_come_back_jagged(part: str) -> None:
    rows = [torch.arange(n) for n in (3, 0, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    tq.kv_batch_put(["a", "b", "c"], part, batch(3, x=nested))
    got = tq.kv_batch_get(["c", "a", "b"], part)["x"]
    assert is_jagged(got)
    assert [row.tolist() for row in got.unbind()] == [[0, 1, 2, 3, 4], [0, 1, 2], []]


def test_columns_know_their_longest_row(part: str) -> None:
    rows = [torch.ones(n) for n in (2, 6, 3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    tq.kv_batch_put(["a", "b", "c"], part, batch(3, x=nested, y=torch.ones(3, 4), o=[{"n": nested}] * 3))
    td = tq.kv_batch_get(["a", "b", "c"], part)
    assert td["x"].to_padded_tensor(0.0).shape == (3, 6)
    assert td["y"].to_padded_tensor(0.0).shape == (3, 4)
    assert td["o"][0]["n"].to_padded_tensor(0.0).shape == (3, 6)
    padded = td.exclude("o").to_padded_tensor(-1.0)
    assert padded["x"].tolist() == [[1.0] * n + [-1.0] * (6 - n) for n in (2, 6, 3)]


def test_zero_dim_rows_come_back_dense(part: str) -> None:
    tq.kv_put("a", part, {"x": torch.tensor(7), "r": torch.tensor(0.5)})
    tq.kv_batch_put(["b"], part, batch(1, x=torch.tensor([8]), r=torch.tensor([1.5])))
    td = tq.kv_batch_get(["b", "a"], part)
    assert not td["x"].is_nested
    assert td["x"].tolist() == [8, 7]
    assert td["r"].tolist() == [1.5, 0.5]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_ragged_in_two_dimensions_come_back_strided(part: str) -> None:
    for key, shape in (("a", (2, 3)), ("b", (4, 1))):
        tq.kv_put(key, part, {"x": torch.ones(shape)})
    got = tq.kv_batch_get(["a", "b"], part)["x"]
    assert got.is_nested
    assert got.layout == torch.strided
    assert [tuple(row.shape) for row in got.unbind()] == [(2, 3), (4, 1)]


def test_objects_come_back_as_a_stack_that_frameworks_can_use(part: str) -> None:
    values = ["s", {"k": [1, 2]}, None]
    tq.kv_batch_put(["a", "b", "c"], part, {"o": values, "x": torch.zeros(3)})
    td = tq.kv_batch_get(["a", "b", "c"], part)
    assert isinstance(td.get("o"), NonTensorStack)
    assert list(td["o"]) == values
    assert td[1]["o"] == {"k": [1, 2]}
    assert td.pop("o").tolist() == values
    assert td.batch_size == torch.Size([3])


def test_unknown_keys_and_fields_are_left_out(part: str) -> None:
    tq.kv_batch_put(["a", "b"], part, batch(2, x=torch.tensor([1, 2]), y=torch.zeros(2)))
    td = tq.kv_batch_get(["b", "nobody", "a"], part, select_fields=["x", "nothing"])
    assert td["x"].tolist() == [2, 1]
    assert set(td.keys()) == {"x"}
    assert tq.kv_batch_get(["a"], part, select_fields="nothing").batch_size == torch.Size([0])


def test_fields_missing_on_some_rows_are_left_out(part: str) -> None:
    tq.kv_batch_put(["a", "b"], part, batch(2, x=torch.tensor([1, 2])))
    tq.kv_put("a", part, {"only_a": torch.tensor(1)})
    assert set(tq.kv_batch_get(["a", "b"], part, ["x", "only_a"]).keys()) == {"x"}
    assert set(tq.kv_batch_get("a", part).keys()) == {"x", "only_a"}


def test_strict_raises_for_unknown_keys_and_fields(part: str) -> None:
    tq.kv_batch_put(["a", "b"], part, batch(2, x=torch.tensor([1, 2])))
    with pytest.raises(UnknownRows, match="nobody"):
        tq.kv_batch_get(["a", "nobody"], part, strict=True)
    with pytest.raises(NotReady, match="nothing"):
        tq.kv_batch_get(["a"], part, ["x", "nothing"], strict=True)


def test_repeated_keys_are_repeated_in_the_result(part: str) -> None:
    tq.kv_batch_put(["a", "b"], part, batch(2, x=torch.tensor([1, 2]), o=NonTensorStack("u", "v")))
    td = tq.kv_batch_get(["b", "a", "b", "b"], part)
    assert td["x"].tolist() == [2, 1, 2, 2]
    assert td["o"] == ["v", "u", "v", "v"]


def test_get_of_nothing_known_is_a_value_error_with_the_known_message(part: str) -> None:
    with pytest.raises(ValueError, match="keys or partition were not found!"):
        tq.kv_batch_get(["a"], part)
    tq.kv_put("a", part, {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="keys or partition were not found!"):
        tq.kv_batch_get(["b", "c"], part)


def test_tag_only_key_is_listed_but_not_readable(part: str) -> None:
    tq.kv_put("data", part, {"x": torch.zeros(1)})
    meta = tq.kv_put("tag", part, tag={"n": 1})
    assert meta.fields == []
    assert tq.kv_list(part) == {part: {"data": {}, "tag": {"n": 1}}}
    for keys in (["tag"], ["data", "tag"]):
        with pytest.raises(ValueError, match="Some fields are not ready in all the requested keys!"):
            tq.kv_batch_get(keys, part)


def test_key_without_fields(part: str) -> None:
    assert tq.kv_put("a", part, {}).fields == []
    assert tq.kv_list(part) == {part: {"a": {}}}


def test_list_of_everything_and_of_nothing(part: str) -> None:
    tq.kv_put("a", part, tag={"n": 1})
    tq.kv_put("b", part + "2", tag={"n": 2})
    found = tq.kv_list()
    assert found[part] == {"a": {"n": 1}}
    assert found[part + "2"] == {"b": {"n": 2}}
    assert tq.kv_list("no such partition") == {}
    tq.kv_clear("b", part + "2")


def test_clear_is_idempotent_and_frees_the_partition_with_its_last_key(part: str) -> None:
    tq.kv_batch_put(["a", "b"], part, batch(2, x=torch.zeros(2)))
    for keys in (["a"], ["a"], "a", ["a", "never"]):
        assert tq.kv_clear(keys, part) is None
    assert tq.kv_list(part) == {part: {"b": {}}}
    tq.kv_clear("b", part)
    assert tq.kv_list(part) == {}
    assert part not in tq.get_client().get_partition_list()
    tq.kv_clear(["b"], part)


def test_clear_of_no_keys_is_refused(part: str) -> None:
    with pytest.raises(ValueError):
        tq.kv_clear([], part)


@pytest.mark.parametrize("width", [4, 100_000])
def test_results_stay_valid_and_writable_after_clear(part: str, width: int) -> None:
    x = torch.arange(4 * width, dtype=torch.float32).view(4, width)
    tq.kv_batch_put(["a", "b", "c", "d"], part, {"x": x, "s": ["p", "q", "r", "s"]})
    td = tq.kv_batch_get(["a", "b", "c", "d"], part)
    tq.kv_clear(["a", "b", "c", "d"], part)
    tq.kv_batch_put(["e", "f", "g", "h"], part, {"x": -x})
    assert torch.equal(td["x"].values(), x.view(-1))
    td["x"].values().mul_(2)
    assert torch.equal(td["x"].values(), 2 * x.view(-1))
    assert torch.equal(tq.kv_batch_get(["e", "f", "g", "h"], part)["x"].values(), -x.view(-1))


def test_get_by_meta_uses_the_fields_of_the_meta(part: str) -> None:
    meta = tq.kv_batch_put(["a", "b"], part, batch(2, x=torch.tensor([1, 2]), y=torch.tensor([3, 4])))
    meta = pickle.loads(pickle.dumps(meta))  # noqa: S301
    assert tq.kv_batch_get_by_meta(meta)["y"].tolist() == [3, 4]
    assert set(tq.kv_batch_get_by_meta(meta, "x").keys()) == {"x"}
    assert set(tq.kv_batch_get_by_meta(meta, ["y"]).keys()) == {"y"}
    tq.kv_batch_put(["a", "b"], part, batch(2, z=torch.zeros(2)))
    assert set(tq.kv_batch_get_by_meta(meta).keys()) == {"x", "y"}
    meta.fields = None
    assert set(tq.kv_batch_get_by_meta(meta).keys()) == {"x", "y", "z"}


def test_get_by_meta_refuses_what_the_meta_lacks(part: str) -> None:
    meta = tq.kv_batch_put(["a"], part, batch(1, x=torch.tensor([1])))
    with pytest.raises(ValueError, match=r"select_fields.*not found"):
        tq.kv_batch_get_by_meta(meta, ["x", "nothing"])
    with pytest.raises(ValueError, match="partition"):
        tq.kv_batch_get_by_meta(tq.KVBatchMeta(keys=["a"], tags=[{}]))


def test_async_twins_do_the_same(part: str) -> None:
    async def main() -> None:
        await tq.async_kv_put("a", part, {"x": torch.tensor(1)}, tag={"n": 1})
        meta = await tq.async_kv_batch_put(["b", "a"], part, batch(2, x=torch.tensor([2, 3])))
        assert meta.tags == [{}, {"n": 1}]
        assert (await tq.async_kv_batch_get(["a", "b"], part))["x"].tolist() == [3, 2]
        assert (await tq.async_kv_batch_get_by_meta(meta))["x"].tolist() == [2, 3]
        assert await tq.async_kv_list(part) == {part: {"b": {}, "a": {"n": 1}}}
        with pytest.raises(ValueError, match="Got duplicated keys"):
            await tq.async_kv_batch_put(["a", "a"], part, batch(2, x=torch.zeros(2)))
        await tq.async_kv_clear(["a", "b"], part)
        assert await tq.async_kv_list(part) == {}

    asyncio.run(main())


def test_a_read_of_a_large_batch_by_other_keys_keeps_order(part: str) -> None:
    x = torch.arange(64 * 4096, dtype=torch.int64).view(64, 4096)
    keys = [f"k{i}" for i in range(64)]
    tq.kv_batch_put(keys, part, {"x": x})
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    got = tq.kv_batch_get([keys[i] for i in order], part)["x"]
    assert torch.equal(got.values().view(64, 4096), x[order])


BAD_PUTS: dict[str, tuple[type[Exception], Callable[[str], Any]]] = {
    "no fields and no tag": (ValueError, lambda p: tq.kv_put("a", p)),
    "no fields and no tags": (ValueError, lambda p: tq.kv_batch_put(["a"], p)),
    "duplicate keys": (ValueError, lambda p: tq.kv_batch_put(["a", "a"], p, batch(2, x=torch.zeros(2)))),
    "duplicate tag keys": (ValueError, lambda p: tq.kv_batch_put(["a", "a"], p, tags=[{}, {}])),
    "too few rows": (ValueError, lambda p: tq.kv_batch_put(["a", "b"], p, batch(1, x=torch.zeros(1)))),
    "too many rows": (ValueError, lambda p: tq.kv_batch_put(["a"], p, batch(2, x=torch.zeros(2)))),
    "columns of two lengths": (
        ValueError,
        lambda p: tq.kv_batch_put(["a", "b"], p, {"x": torch.zeros(2), "y": torch.zeros(3)}),
    ),
    "short tags": (ValueError, lambda p: tq.kv_batch_put(["a", "b"], p, batch(2, x=torch.zeros(2)), tags=[{}])),
    "long tags": (ValueError, lambda p: tq.kv_batch_put(["a"], p, batch(1, x=torch.zeros(1)), tags=[{}, {}])),
    "tags only, short": (ValueError, lambda p: tq.kv_batch_put(["a", "b"], p, tags=[{}])),
    "empty keys": (ValueError, lambda p: tq.kv_batch_put([], p, batch(1, x=torch.zeros(1)))),
    "int key": (TypeError, lambda p: tq.kv_put(5, p, {"x": torch.zeros(1)})),  # type: ignore[arg-type]
    "int keys": (TypeError, lambda p: tq.kv_batch_put([1], p, batch(1, x=torch.zeros(1)))),  # type: ignore[list-item]
    "tuple of keys": (TypeError, lambda p: tq.kv_batch_put(("a",), p, batch(1, x=torch.zeros(1)))),  # type: ignore[arg-type]
    "nested tensor": (
        ValueError,
        lambda p: tq.kv_put("a", p, {"x": torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)}),
    ),
    "fields=list": (ValueError, lambda p: tq.kv_put("a", p, [1, 2])),  # type: ignore[arg-type]
    "TensorDict of two rows": (ValueError, lambda p: tq.kv_put("a", p, batch(2, x=torch.zeros(2)))),
    "TensorDict without rows": (ValueError, lambda p: tq.kv_put("a", p, TensorDict({"x": torch.zeros(2)}, []))),
    "columns without rows": (ValueError, lambda p: tq.kv_batch_put(["a"], p, {"x": torch.tensor(1)})),
    "a number as column": (CallerError, lambda p: tq.kv_batch_put(["a"], p, {"x": 5})),
    "a tag that is no dict": (ValueError, lambda p: tq.kv_put("a", p, tag=[1])),  # type: ignore[arg-type]
    "a tag with a lambda": (TypeError, lambda p: tq.kv_put("a", p, tag={"f": lambda: 0})),
    "a value with a lambda": (TypeError, lambda p: tq.kv_put("a", p, {"x": torch.zeros(1), "f": lambda: 0})),
    "sparse tensor": (TypeError, lambda p: tq.kv_put("a", p, {"x": torch.eye(2).to_sparse()})),
    "meta tensor": (TypeError, lambda p: tq.kv_put("a", p, {"x": torch.empty(2, device="meta")})),
    "tuple field name": (ValueError, lambda p: tq.kv_batch_put(["a"], p, {("x", "y"): torch.zeros(1)})),  # type: ignore[dict-item]
    "no partition": (ValueError, lambda p: tq.kv_put("a", None, {"x": torch.zeros(1)})),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", BAD_PUTS)
def test_a_bad_put_is_refused_and_leaves_nothing(part: str, what: str) -> None:
    before = tq.get_client().stats()
    error, put = BAD_PUTS[what]
    with pytest.raises(error) as caught:
        put(part)
    assert isinstance(caught.value, CallerError)
    assert part not in tq.kv_list()
    after = tq.get_client().stats()
    assert (after["rows"], after["arena_nbytes_used"]) == (before["rows"], before["arena_nbytes_used"])


def test_a_refused_put_leaves_existing_rows_as_they_are(part: str) -> None:
    tq.kv_batch_put(["a", "b"], part, batch(2, x=torch.tensor([1.0, 2.0])), tags=[{"n": 1}, {"n": 2}])
    with pytest.raises(InvalidInput):
        tq.kv_batch_put(["a", "a"], part, batch(2, x=torch.tensor([8.0, 9.0])), tags=[{"n": 8}, {"n": 9}])
    other = batch(2, x=torch.tensor([8, 9]))
    with pytest.raises(SchemaConflict, match="dtype"):
        tq.kv_batch_put(["a", "c"], part, other, tags=[{"n": 8}, {"n": 9}], strict_schema=True)
    with pytest.raises(SchemaConflict):
        tq.kv_batch_put(["a", "c"], part, {"x": ["s", "t"]}, strict_schema=True)
    with pytest.raises(SchemaConflict, match="dims"):
        tq.kv_put("c", part, {"x": torch.zeros(3)}, strict_schema=True)
    assert tq.kv_list(part) == {part: {"a": {"n": 1}, "b": {"n": 2}}}
    assert tq.kv_batch_get(["a", "b"], part)["x"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda p: tq.kv_batch_get(["a"], None),
        lambda p: tq.kv_batch_get(["a"], p, select_fields=[5]),
        lambda p: tq.kv_clear(["a"], None),
        lambda p: tq.kv_list(5),
        lambda p: tq.get_client().get_meta(["x"], 1, None, mode="insert"),
        lambda p: tq.get_client().get_meta([3], 1, p, mode="fetch", task_name="t"),
        lambda p: tq.get_client().clear_partition(7),
        lambda p: tq.get_client().set_partition(p, size="many"),
    ],
)
def test_arguments_of_a_wrong_type_are_the_callers_error(part: str, call: Callable[[str], Any]) -> None:
    tq.kv_put("a", part, {"x": torch.zeros(1)})
    with pytest.raises((CallerError, TypeError)):
        call(part)
    assert tq.kv_list(part) == {part: {"a": {}}}


def test_keys_of_a_get_are_checked(part: str) -> None:
    tq.kv_put("a", part, {"x": torch.zeros(1)})
    for keys in (5, ("a",), [1], None):
        with pytest.raises(UnsupportedValue):
            tq.kv_batch_get(keys, part)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        tq.kv_batch_get([], part)


def test_data_parser_runs_here_and_must_keep_fields_and_lengths(part: str) -> None:
    def double(columns: dict[str, Any]) -> dict[str, Any]:
        return {"x": columns["x"].double() * 2}

    tq.kv_batch_put(["a", "b"], part, batch(2, x=torch.tensor([1.0, 2.0])), data_parser=double)
    tq.kv_put("c", part, {"x": torch.tensor(3.0)}, data_parser=double)
    got = tq.kv_batch_get(["a", "b", "c"], part)["x"]
    assert (got.tolist(), got.dtype) == ([2.0, 4.0, 6.0], torch.float64)
    wrong: list[Any] = [lambda c: {}, lambda c: {**c, "y": c["x"]}, lambda c: {"x": c["x"][:1]}, lambda c: None]
    for bad in wrong:
        with pytest.raises((ValueError, RuntimeError)):
            tq.kv_batch_put(["d", "e"], part, batch(2, x=torch.zeros(2)), data_parser=bad)
    assert "d" not in tq.kv_list(part)[part]


def test_a_parser_gets_rows_as_lists_where_they_are_no_tensor_and_objects_stay_objects(part: str) -> None:
    urls = NonTensorStack("a.png", "bc.png")
    ragged = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    columns = batch(2, image=urls, ids=ragged, turns=NonTensorStack(*map(NonTensorData, (3, 4))))

    def fetched(given: dict[str, Any]) -> dict[str, Any]:
        given["image"][:] = [torch.full((2,), len(url)) for url in given["image"]]
        given["ids"][0] = torch.zeros(3)
        return given

    tq.kv_batch_put(["a", "b"], part, columns, data_parser=fetched)
    got = tq.kv_batch_get(["a", "b"], part)
    assert [row.tolist() for row in got["image"].unbind()] == [[5, 5], [6, 6]]
    assert [row.tolist() for row in got["ids"].unbind()] == [[0, 0, 0], [1, 1]]
    assert got["turns"] == [3, 4]
    assert urls.tolist() == ["a.png", "bc.png"]


def test_what_a_caller_does_to_a_listing_reaches_no_later_listing(client: tq.TransferQueueClient) -> None:
    tags = [{"n": n, "history": [n]} for n in range(3)]
    tq.kv_batch_put(["a", "b", "c"], "p", tags=tags)
    mine = tq.kv_list("p")["p"]
    mine["a"]["history"].append("changed")
    for tag in mine.values():
        tag["history"].append("changed too")
        tag["n"] = -1
    assert tq.kv_list("p") == {"p": dict(zip("abc", tags, strict=True))}
