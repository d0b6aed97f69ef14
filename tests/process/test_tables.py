"""A live partition as a table of Arrow: values, types, absent cells, and rows that go while it is read."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import duckdb
import numpy as np
import pandas
import polars
import pyarrow as pa
import pytest
import torch
from PIL import Image

import transfer_queue as tq
from transfer_queue.errors import InvalidInput, NotSupported, SchemaConflict, UnknownRows

pytestmark = pytest.mark.usefixtures("shared")


def values(name: str, partition: str, **more: Any) -> list[Any]:
    found: list[Any] = tq.table(partition, **more).to_arrow()[name].to_pylist()
    return found


def test_numbers_are_columns_of_their_type_and_absent_cells_are_null() -> None:
    tq.kv_batch_put(["a", "b"], "numbers", {"x": torch.tensor([1.5, 2.5]), "n": torch.tensor([1, 2])})
    tq.kv_put("c", "numbers", {"n": torch.tensor(3)})
    found = tq.table("numbers").to_arrow()
    assert found.schema.names == ["global_index", "key", "x", "n"]
    assert found.schema.field("x").type == pa.float32()
    assert found["key"].to_pylist() == ["a", "b", "c"]
    assert found["x"].to_pylist() == [1.5, 2.5, None]
    assert found["n"].to_pylist() == [1, 2, 3]
    assert found["x"].null_count == 1


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.uint32, torch.int64, torch.float64, torch.float16,
              torch.bfloat16, torch.float8_e4m3fn]
)  # fmt: skip
def test_every_dtype_keeps_its_values(dtype: torch.dtype) -> None:
    partition = f"dtype {dtype}"
    given = torch.tensor([0, 1, 1]).to(dtype)
    tq.kv_batch_put(["a", "b", "c"], partition, {"x": given})
    found = tq.table(partition).to_arrow()
    assert found["x"].to_pylist() == given.to(torch.float64).tolist()
    assert found.schema.field("x").metadata[b"tq.dtype"] == str(dtype).removeprefix("torch.").encode()


@pytest.mark.parametrize("dtype", [torch.bits8, torch.int1], ids=str)
def test_a_dtype_without_numbers_is_described(dtype: torch.dtype) -> None:
    rows = torch.ones(2, 3, dtype=torch.uint8).view(dtype)
    name = str(dtype).removeprefix("torch.")
    tq.kv_batch_put(["a", "b"], name, {"x": rows, "ragged": [rows[0], rows[0, :1]]})
    found = tq.table(name).to_arrow().to_pydict()
    assert [found["x"][0], found["ragged"][1]] == [f'"<tensor {name} 3>"', f'"<tensor {name} 1>"']


def test_nan_stays_nan_and_is_not_null() -> None:
    tq.kv_batch_put(["a", "b"], "nan", {"x": torch.tensor([float("nan"), float("-inf")])})
    column = tq.table("nan").to_arrow()["x"]
    assert column.null_count == 0
    assert np.isnan(column[0].as_py())
    assert column[1].as_py() == float("-inf")


def test_tensors_of_one_shape_are_lists_of_fixed_size_with_the_shape_beside_them() -> None:
    given = torch.arange(12).view(2, 2, 3)
    tq.kv_batch_put(["a", "b"], "shapes", {"m": given, "empty": torch.ones(2, 0)})
    found = tq.table("shapes").to_arrow()
    assert found.schema.field("m").type == pa.list_(pa.int64(), 6)
    assert found.schema.field("m").metadata[b"tq.shape"] == b"[2, 3]"
    assert found["m"].to_pylist() == given.reshape(2, 6).tolist()
    assert found["empty"].to_pylist() == [[], []]


@pytest.mark.parametrize(
    "shapes", [[(2,), (5,)], [(2, 3), (4, 3)], [(3, 2), (3, 4)], [(2, 3), (4, 1)], [(0,), (2,)], [(2, 1, 3), (1, 2, 3)]]
)
def test_tensors_whose_shapes_differ_are_lists_in_lists(shapes: list[tuple[int, ...]]) -> None:
    rows = [torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape) for shape in shapes]
    partition = f"ragged {shapes}"
    tq.kv_batch_put(["a", "b"], partition, {"r": rows})
    assert values("r", partition) == [row.tolist() for row in rows]


def test_a_field_that_became_ragged_by_a_later_put_is_lists() -> None:
    tq.kv_put("a", "widens", {"r": torch.ones(2)})
    tq.kv_put("b", "widens", {"r": torch.ones(3)})
    assert values("r", "widens") == [[1.0, 1.0], [1.0, 1.0, 1.0]]


def test_complex_numbers_are_pairs() -> None:
    tq.kv_batch_put(["a", "b"], "complex", {"c": torch.tensor([1 + 2j, 3 - 1j])})
    assert values("c", "complex") == [[1.0, 2.0], [3.0, -1.0]]


def test_strings_are_whole_and_objects_are_previews() -> None:
    huge = "ä" * 5_000_000
    tq.kv_batch_put(
        ["a", "b", "c"], "texts", {"s": ["one", huge, "\ud800"], "o": [{"x": [1, None]}, None, list(range(9999))]}
    )
    assert values("s", "texts") == ["one", huge, "\\ud800"]
    first, second, third = values("o", "texts")
    assert (first, second) == ('{"x": [1, null]}', None)
    assert len(third) == 1024
    assert len(values("o", "texts", preview_chars=20)[2]) == 20
    assert len(values("o", "texts", preview_chars=None)[2]) > 40_000


def test_keys_that_json_cannot_tell_apart_are_pairs() -> None:
    tq.kv_batch_put(["a", "b"], "keys of dicts", {"o": [{1: "number", "1": "text"}, {1: "number"}]})
    assert values("o", "keys of dicts") == ['[[1, "number"], ["1", "text"]]', '{"1": "number"}']


@pytest.mark.parametrize("max_chars", [1024, None])
def test_json_is_json_whatever_the_numbers_are(max_chars: int | None) -> None:
    huge = 10**5000
    cells = [
        {"score": float("nan"), "array": np.array([[1.0, float("inf")]])}, [huge, {huge: 1}], np.longdouble(1.5),
        [np.array([1.5], np.longdouble)],
    ]  # fmt: skip
    keys = [str(number) for number in range(len(cells))]
    tq.kv_batch_put(keys, f"odd numbers {max_chars}", {"o": cells})
    texts = values("o", f"odd numbers {max_chars}", preview_chars=max_chars)
    first, second, third, fourth = map(json.loads, [texts[0], "0" if max_chars else texts[1], *texts[2:]])
    assert first == {"score": None, "array": [[1.0, None]]}
    assert texts[1].startswith('["<int of 16610 bits>"') if max_chars else int(second[0], 16) == huge
    assert (third, fourth) == ("1.5", ["<array float128 1>"])


def test_images_are_previews_or_the_bytes_of_their_files(tmp_path: Any) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (4, 3)).save(path)
    with Image.open(path) as opened:
        tq.kv_batch_put(["a", "b"], "images", {"i": [opened, Image.new("L", (2, 2))], "n": torch.ones(2)})
    size = path.stat().st_size
    assert values("i", "images") == [f'"<image, PNG file, {size} bytes>"', '"<image, L 2x2, 4 bytes>"']
    assert values("i", "images", as_bytes=["i"]) == [path.read_bytes(), None]
    with pytest.raises(InvalidInput, match="'n' has numbers"):
        tq.table("images", as_bytes=["n"])


def test_what_only_its_writer_can_rebuild_is_shown_not_rebuilt() -> None:
    class Known:
        made = 0

        def __init__(self, x: int) -> None:
            type(self).made += 1
            self.x = x

    tq.register_type(Known, name="Known", to_plain=vars, from_plain=lambda plain: Known(plain["x"]))
    tq.kv_batch_put(["a", "b"], "known", {"k": [Known(1), Known(2)]})
    made = Known.made
    assert values("k", "known") == ['{"Known": {"x": 1}}', '{"Known": {"x": 2}}']
    assert Known.made == made


def test_pickled_values_and_configs_are_shown_not_evaluated(child: Any) -> None:
    code = (
        "import transfer_queue as tq\n"
        "from omegaconf import OmegaConf\n"
        "tq.init({'client': {'allow_pickle': True}})\n"
        "class Odd:\n    def __init__(self): self.x = 1\n"
        "tq.kv_batch_put(['a'], 'pickled', {'p': [Odd()], 'c': [OmegaConf.create({'e': '${oc.env:HOME}'})]})\n"
        "tq.close()"
    )
    child(code).finish()
    assert values("p", "pickled")[0].startswith('"<pickle, ')
    assert values("c", "pickled") == ['{"config": {"e": "${oc.env:HOME}"}}']


def test_rows_of_several_kinds_are_text() -> None:
    tq.kv_put("a", "mixed", {"x": torch.tensor(1.5)})
    tq.kv_put("b", "mixed", {"x": torch.tensor([1, 2])})
    tq.kv_put("c", "mixed", {"x": "three"})
    tq.kv_put("d", "mixed", {"x": torch.tensor([1.0, 2.0])})
    assert values("x", "mixed") == ["1.5", "[1, 2]", "three", "[1.0, 2.0]"]


def test_tags_are_columns_of_one_type_or_json() -> None:
    tags = [{"n": 1, "f": 1, "s": "x", "m": 1, "b": True, "l": [1], "big": 1 << 70}, {"f": 0.5, "m": "1", "b": None}]
    tq.kv_batch_put(["a", "b"], "tags", tags=tags)
    found = tq.table("tags").to_arrow()
    shown = {name: found[f"tag_{name}"].to_pylist() for name in ("n", "f", "s", "m", "b", "l", "big")}
    assert shown == {
        "n": [1, None], "f": [1.0, 0.5], "s": ["x", None], "m": ["1", '"1"'], "b": [True, None], "l": ["[1]", None],
        "big": [str(1 << 70), None],
    }  # fmt: skip
    assert found.schema.field("tag_n").type == pa.int64()
    assert found.schema.field("tag_f").type == pa.float64()
    assert tq.table("tags", tags=["n", "none"]).to_arrow()["tag_none"].to_pylist() == [None, None]


def test_tags_of_rows_that_were_cleared_are_no_columns() -> None:
    tq.kv_batch_put(["a", "b", "c"], "went", {"x": torch.arange(3)}, tags=[{"old": 1}, {"n": 2}, {}])
    tq.kv_clear("a", "went")
    found = tq.table("went").to_arrow()
    assert found.schema.names == ["global_index", "key", "x", "tag_n"]
    assert found["tag_n"].to_pylist() == [2, None]
    assert tq.table("went", keys=["c", "b"], tags=["n"]).to_arrow()["tag_n"].to_pylist() == [None, 2]


def test_more_names_of_tags_than_a_table_should_have_are_one_column() -> None:
    tq.kv_batch_put([str(n) for n in range(1001)], "many tags", tags=[{f"t{n}": n} for n in range(1001)])
    found = tq.table("many tags").to_arrow()
    assert found.schema.names == ["global_index", "key", "tags"]
    assert found["tags"][7].as_py() == '{"t7": 7}'


def test_hostile_names_stay_columns_of_their_own() -> None:
    names = ["key", "KEY", 'a"b', "a\0b", "", "x\n\x1b[31m", "y" * 10_000]
    tq.kv_batch_put(
        ["a"], "names", {name: torch.tensor([number]) for number, name in enumerate(names)}, tags=[{"q\0": 1}]
    )
    found = tq.table("names").to_arrow()
    assert len({name.casefold() for name in found.schema.names}) == len(names) + 3
    assert [found[at][0].as_py() for at in range(2, 2 + len(names))] == list(range(len(names)))
    assert found.schema.names[2:6] == ["key_2", "KEY_3", 'a"b', "a␀b"]
    assert found.schema.field("key_2").metadata[b"tq.field"] == b"key"


def test_only_the_fields_and_rows_that_were_asked_for() -> None:
    tq.kv_batch_put(["a", "b", "c"], "some", {"x": torch.arange(3), "y": torch.ones(3)}, tags=[{"t": 1}] * 3)
    found = tq.table("some", ["y"], keys=["c", "a"], tags=[]).to_arrow()
    assert found.schema.names == ["global_index", "key", "y"]
    assert sorted(found["key"].to_pylist()) == ["a", "c"]
    assert tq.table("some").select(["x"]).to_arrow().schema.names == ["x"]


def test_unknown_names_are_refused_with_the_nearest_one() -> None:
    tq.kv_batch_put(["a"], "rollouts", {"reward": torch.ones(1)})
    with pytest.raises(UnknownRows, match="'rollout' does not exist; the nearest is 'rollouts'"):
        tq.table("rollout")
    with pytest.raises(InvalidInput, match="no field 'rewards'; the nearest is 'reward'"):
        tq.table("rollouts", ["rewards"])
    with pytest.raises(UnknownRows, match="keys not found"):
        tq.table("rollouts", keys=["a", "b"])
    with pytest.raises(InvalidInput, match="no column 'x'"):
        tq.table("rollouts").select(["x"])
    for wrong in ({"fields": "reward"}, {"keys": []}, {"tags": "t"}, {"preview_chars": 0}):
        with pytest.raises(InvalidInput):
            tq.table("rollouts", **wrong)  # type: ignore[arg-type]


def test_a_partition_without_rows_is_an_empty_table() -> None:
    tq.get_client().set_partition("empty", size=8)
    found = tq.table("empty")
    assert len(found) == 0
    assert found.to_arrow().num_rows == 0
    assert found.schema.names == ["global_index", "key"]


def test_rows_without_keys_have_null_for_a_key() -> None:
    tq.get_client().put({"x": torch.arange(2)}, partition_id="keyless")
    assert values("key", "keyless") == [None, None]
    assert values("x", "keyless") == [0, 1]


def test_rows_cleared_between_listing_and_reading_are_left_out() -> None:
    tq.kv_batch_put(["a", "b", "c"], "cleared", {"x": torch.arange(3)}, tags=[{"t": n} for n in range(3)])
    found = tq.table("cleared")
    tq.kv_clear("b", "cleared")
    tq.kv_put("d", "cleared", {"x": torch.tensor(9)})
    now = found.to_arrow()
    assert [now[name].to_pylist() for name in ("key", "x", "tag_t")] == [["a", "c"], [0, 2], [0, 2]]
    assert found.select(["key"]).to_arrow()["key"].to_pylist() == ["a", "c"]
    tq.kv_clear(["a", "c", "d"], "cleared")
    assert found.to_arrow().num_rows == 0
    assert found.select(["key"]).to_arrow().num_rows == 0


def test_rows_cleared_between_two_batches_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_queue.tables.cell_batches.BATCH_ROWS", 2)
    tq.kv_batch_put([str(n) for n in range(6)], "batches", {"x": torch.arange(6)})
    batches = tq.table("batches").batches()
    assert next(batches)["x"].to_pylist() == [0, 1]
    tq.kv_clear(["2", "5"], "batches")
    assert [batch["x"].to_pylist() for batch in batches] == [[3], [4]]


def test_a_cell_written_since_as_another_kind_is_refused() -> None:
    tq.kv_batch_put(["a", "b"], "changed", {"x": torch.arange(2)})
    found = tq.table("changed")
    tq.kv_batch_put(["a", "b"], "changed", {"x": torch.ones(2, 3)})
    with pytest.raises(SchemaConflict, match="make the table again"):
        found.to_arrow()


@pytest.mark.parametrize(
    ("before", "since"),
    [
        (torch.zeros(2), torch.full((2,), 0.1, dtype=torch.float64)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.full((2,), 0.1, dtype=torch.float64)),
        (torch.zeros(2, dtype=torch.bool), torch.arange(2, 4)),
        (torch.zeros(2), torch.tensor([True, False])),
        (torch.zeros(2, dtype=torch.int64), torch.tensor([0.5, 1.5])),
    ],
)
def test_a_cell_written_since_as_another_number_is_never_rounded(before: torch.Tensor, since: torch.Tensor) -> None:
    tq.kv_batch_put(["a", "b"], "rounded", {"x": before})
    found = tq.table("rounded")
    tq.kv_batch_put(["a", "b"], "rounded", {"x": since})
    with pytest.raises(SchemaConflict, match="field 'x'"):
        found.to_arrow()
    tq.get_client().clear_partition("rounded")


def test_integers_of_python_among_floats_are_floats_also_in_a_batch_of_their_own() -> None:
    tq.kv_batch_put(["a", "b"], "weak", {"x": [1, 2]})
    tq.kv_batch_put(["c", "d"], "weak", {"x": [0.5, 1.5]})
    tq.kv_batch_put(["a", "b"], "weak", {"y": torch.zeros(2)})
    assert tq.table("weak", keys=["a", "b"]).to_arrow()["x"].to_pylist() == [1.0, 2.0]


def test_batches_are_bounded_in_bytes_also_where_rows_have_any_size() -> None:
    tq.kv_batch_put([str(n) for n in range(64)], "big rows", {"s": ["x" * (2 << 20)] * 64})
    sizes = [batch.num_rows for batch in tq.table("big rows", ["s"]).batches()]
    assert sizes == [16, 16, 16, 16]
    tq.kv_batch_put([str(n) for n in range(5000)], "small rows", {"s": ["x"] * 5000})
    assert [batch.num_rows for batch in tq.table("small rows").batches()] == [16, 256, 4096, 632]


def test_data_frames_and_databases_read_a_table_directly() -> None:
    tq.kv_batch_put(["a", "b"], "frames", {"x": torch.tensor([1.0, 2.0]), "r": [torch.ones(1), torch.ones(2)]})
    found = tq.table("frames")
    assert polars.DataFrame(found)["x"].to_list() == [1.0, 2.0]
    assert duckdb.sql("select sum(x) from found").fetchall() == [(3.0,)]
    assert pa.table(found)["r"].to_pylist() == [[1.0], [1.0, 1.0]]
    frame = found.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["x"].tolist() == [1.0, 2.0]
    assert "2 rows: global_index, key, x, r" in repr(found)


def test_without_pyarrow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        NotSupported, match=r"needs pyarrow, which is not installed: pip install 'transfer-queue\[arrow\]'"
    ):
        tq.table("any")
    with pytest.raises(NotSupported, match=r"transfer-queue\[sql\]"):
        tq.sql("select 1")


def test_what_an_overview_lists_is_a_table(shared: tq.TransferQueueClient) -> None:
    tq.kv_batch_put(["a", "b", "c"], "seen", {"x": torch.zeros(3, 2), "s": ["a", "b", "c"]})
    shared.set_partition("seen", metadata={"epoch": float("nan")})
    held = shared.get_meta(["x"], 1, "seen", task_name="actor", lease_s=60.0)
    pool = tq.group_pool("seen", tq.GroupPolicy())
    pool.open("g", 2, source="math")
    names = ["partitions", "fields", "tasks", "waits", "leases", "sessions", "sources", "replicas"]
    found = {name: tq.overview_table(name) for name in names}
    tasks = polars.DataFrame(found["tasks"])
    (task,) = tasks.filter((tasks["partition"] == "seen") & (tasks["task"] == "actor")).to_dicts()
    assert (task["ready"], task["leased"], task["consumed"], task["max_age"]) == (2, 1, 0, None)
    leases, sessions = found["leases"], found["sessions"]
    joined = "select pid, rows from leases, sessions where list_contains(holders, session) and partition = 'seen'"
    assert duckdb.sql(joined).fetchall() == [(os.getpid(), 1)]
    assert sessions.num_rows == leases.num_rows == 1
    fields = [(one["field"], one["shape"], one["written"]) for one in found["fields"].to_pylist()]
    assert {("x", (2,), 3), ("s", (), 3)} <= {(name, tuple(shape), written) for name, shape, written in fields}
    assert [one["opened"] for one in found["sources"].to_pylist() if one["source"] == "math"] == [1]
    (about,) = [one for one in found["partitions"].to_pylist() if one["partition"] == "seen"]
    assert (about["rows"], about["metadata"]) == (3, '{"epoch": null}')
    assert all(pa.table(one).schema.names for one in found.values())
    pool.remove(discard=True)
    shared.ack(held)


def test_an_overview_lists_what_it_lists() -> None:
    with pytest.raises(InvalidInput, match=r"expected one of partitions, fields, tasks.*the nearest is 'tasks'"):
        tq.overview_table("task")
