"""Partitions as files: whole or not at all, and what other libraries read of them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Child, until
from strikes import UNCLEAN, strikes
from test_tables_sql import command

import transfer_queue as tq
from transfer_queue.errors import DataLost, InvalidInput, NotSupported, UnknownRows
from transfer_queue.tables import cell_batches, export, table_files

pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> str:
    """A partition of 100 rows with columns of each kind, in several batches of 16 rows and more."""
    partition: str = request.node.name
    fields = {
        "x": torch.arange(100.0), "m": torch.ones(100, 2, 3), "r": [torch.arange(n % 5) for n in range(100)],
        "s": [f"text {n}" for n in range(100)], "e": torch.ones(100, 0),
    }  # fmt: skip
    tq.kv_batch_put([str(n) for n in range(100)], partition, fields, tags=[{"step": n} for n in range(100)])
    tq.kv_put("bare", partition, {"x": torch.tensor(float("nan"))})
    return partition


def test_a_file_has_the_rows_and_types_of_the_table(rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "GROUP_NBYTES", 1 << 12)
    path = tmp_path / "a.parquet"
    told = tq.export_table(rows, path)
    found = pq.read_table(path)
    assert found.schema == tq.table(rows).schema
    assert found.drop_columns("x").equals(tq.table(rows).to_arrow().drop_columns("x"))
    assert told == {"rows": 101, "files": 1, "bytes": path.stat().st_size}
    assert pq.ParquetFile(path).num_row_groups > 1
    assert duckdb.sql(f"select count(*), max(tag_step) from '{path}'").fetchall() == [(101, 99)]
    assert polars.read_parquet(path)["r"][4].to_list() == [0, 1, 2, 3]
    assert os.listdir(tmp_path) == ["a.parquet"]


def test_a_name_of_many_bytes_is_one_for_a_file(rows: str, tmp_path: Path) -> None:
    name = "ä" * 120 + ".parquet"
    tq.export_table(rows, tmp_path / name)
    assert os.listdir(tmp_path) == [name]


def test_what_is_there_is_kept_unless_it_is_a_file_to_overwrite(rows: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"a\.parquet exists"):
        tq.export_table(rows, path)
    with pytest.raises(FileExistsError, match="never replaced"):
        tq.export_table(rows, tmp_path, overwrite=True)
    assert path.read_text() == "mine"
    tq.export_table(rows, path, overwrite=True)
    assert pq.read_table(path).num_rows == 101


def test_two_that_write_one_file_both_write_a_whole_one(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, path = cell_batches.CellBatches._read, tmp_path / "a.parquet"

    def beside(*given: Any) -> Any:
        monkeypatch.setattr(cell_batches.CellBatches, "_read", plain)
        tq.export_table(rows, path)
        return plain(*given)

    monkeypatch.setattr(cell_batches.CellBatches, "_read", beside)
    tq.export_table(rows, path, overwrite=True)
    assert pq.read_table(path).num_rows == 101
    assert os.listdir(tmp_path) == ["a.parquet"]


@pytest.mark.parametrize("name", ["a.parquet", "directory", "dataset"])
def test_an_export_that_fails_leaves_nothing(
    rows: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = cell_batches.CellBatches._read, []

    def lost(self: Any, places: Any, names: list[str]) -> Any:
        calls.append(names)
        if len(calls) > 3:
            raise DataLost("the host is gone")
        return plain(self, places, names)

    monkeypatch.setattr(cell_batches.CellBatches, "_read", lost)
    with pytest.raises(DataLost):
        tq.export_table(rows, tmp_path / name, "hf" if name == "dataset" else "parquet")
    assert os.listdir(tmp_path) == []


def test_a_directory_has_files_of_bounded_size(rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "SHARD_NBYTES", 1)
    told = tq.export_table(rows, tmp_path / "d")
    assert sorted(os.listdir(tmp_path / "d")) == [f"data-{n:05d}.parquet" for n in range(told["files"])]
    assert told["files"] > 1
    assert pq.read_table(tmp_path / "d")["key"].to_pylist() == [*map(str, range(100)), "bare"]
    assert told["bytes"] == sum(path.stat().st_size for path in (tmp_path / "d").iterdir())


def test_a_dataset_has_the_layout_that_hugging_face_reads(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SHARD_NBYTES", 1)
    told = tq.export_table(rows, tmp_path / "d", format="hf")
    names = sorted(os.listdir(tmp_path / "d" / "data"))
    assert names == [f"train-{n:05d}-of-{told['files']:05d}.parquet" for n in range(told["files"])]
    about = json.loads((tmp_path / "d" / "dataset_info.json").read_text())
    assert about["splits"]["train"]["num_examples"] == 101
    assert about["dataset_size"] == told["bytes"]


def test_a_dataset_on_disk_has_the_layout_that_hugging_face_maps(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SHARD_NBYTES", 1)
    told = tq.export_table(rows, tmp_path / "d", format="hf-disk")
    state = json.loads((tmp_path / "d" / "state.json").read_text())
    names = [one["filename"] for one in state["_data_files"]]
    assert names == [f"data-{n:05d}-of-{told['files']:05d}.arrow" for n in range(told["files"])]
    assert sorted([*names, "dataset_info.json", "state.json"]) == sorted(os.listdir(tmp_path / "d"))
    assert (state["_split"], state["_format_type"], len(state["_fingerprint"])) == ("train", None, 16)
    found = pa.concat_tables([pa.ipc.open_stream(tmp_path / "d" / name).read_all() for name in names])
    assert found.schema == tq.table(rows).schema
    assert found.drop_columns("x").equals(tq.table(rows).to_arrow().drop_columns("x"))


@pytest.fixture
def large_rows(request: pytest.FixtureRequest) -> str:
    """A partition of 4 MB."""
    partition: str = request.node.name
    tq.kv_batch_put([str(n) for n in range(64)], partition, {"x": torch.rand(64, 1 << 14)})
    return partition


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """What this process writes into a file behind that is refused by the system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("form", ["parquet", "hf", "hf-disk"])
def test_bytes_that_the_disk_refuses_are_an_error_and_leave_no_thread(
    large_rows: str, form: str, tmp_path: Path
) -> None:
    with files_of_at_most(1 << 20), pytest.raises(OSError, match="File too large") as failed:
        tq.export_table(large_rows, tmp_path / ("a.parquet" if form == "parquet" else "d"), form)
    assert failed.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []
    assert "tq-export" not in {thread.name for thread in threading.enumerate()}


def is_writing() -> bool:
    return "tq-export" in {thread.name for thread in threading.enumerate()}


def test_a_writer_waits_where_the_disk_is_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "HELD_NBYTES", 1000)
    schema = pa.schema([("x", pa.int64())])
    sink = table_files.BatchSink(tmp_path / "a", schema, 10)
    sink.start()
    for n in range(200):
        batch = pa.record_batch({"x": range(n * 50, n * 50 + 50)}, schema)
        sink.add(batch)
        assert sink._held_nbytes <= 1000 + batch.nbytes
    sink.end()
    assert pq.read_table(tmp_path / "a")["x"].to_pylist() == list(range(10_000))


@UNCLEAN[0]
@UNCLEAN[1]
@pytest.mark.parametrize("kind", [table_files.ParquetFile, table_files.ArrowFile])
def test_an_interrupt_anywhere_ends_the_thread_that_writes(
    kind: type[table_files.TableFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_files, "HELD_NBYTES", 1)
    monkeypatch.setattr(table_files, "GROUP_NBYTES", 1)

    def write() -> None:
        with kind(tmp_path / "a", pa.schema([("x", pa.int64())])) as file:
            file.write(pa.record_batch({"x": [1, 2]}))
            file.write(pa.record_batch({"x": [3]}))

    for strike in strikes(write, only="tables"):
        until(lambda: not is_writing(), f"the end of the thread: {strike}")


def test_a_file_that_nobody_has_any_more_keeps_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may strike wherever it would be closed."""
    monkeypatch.setattr(table_files, "GROUP_NBYTES", 1)
    table_files.ParquetFile(tmp_path / "a", pa.schema([("x", pa.int64())])).write(pa.record_batch({"x": [1]}))
    until(lambda: not is_writing(), "the thread ended")
    until(lambda: str(tmp_path / "a") not in open_files(), "polars closed the file")  # in a thread of its own


def open_files() -> set[str]:
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found.add(os.readlink(one))
    return found


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[str, list[int]]:
    """A partition whose rows become longer, and how long they are, where row groups and batches are small."""
    monkeypatch.setattr(table_files, "GROUP_NBYTES", 1 << 12)
    monkeypatch.setattr(cell_batches, "BATCH_NBYTES", 1 << 12)
    partition, lengths = request.node.name, [1] * 2000 + [1000] * 900
    tq.kv_batch_put([str(n) for n in range(2900)], partition, {"r": [torch.arange(length) for length in lengths]})
    return partition, lengths


def test_a_file_whose_later_rows_are_much_larger_has_small_row_groups(
    growing: tuple[str, list[int]], tmp_path: Path
) -> None:
    partition, lengths = growing
    assert tq.export_table(partition, tmp_path / "a.parquet")["rows"] == 2900
    found = pq.ParquetFile(tmp_path / "a.parquet")
    assert [len(row) for row in found.read()["r"].to_pylist()] == lengths
    groups = [found.metadata.row_group(number) for number in range(found.num_row_groups)]
    assert max(group.total_byte_size for group in groups) < (1 << 12) * table_files.UNEVEN * 2


def test_a_directory_whose_later_rows_are_much_larger_has_one_more_file(
    growing: tuple[str, list[int]], tmp_path: Path
) -> None:
    partition, lengths = growing
    assert tq.export_table(partition, tmp_path / "d")["files"] > 1
    assert [len(row) for row in pq.read_table(tmp_path / "d")["r"].to_pylist()] == lengths


def test_texts_are_compressed_and_numbers_are_not(rows: str, tmp_path: Path) -> None:
    for columns, wanted in ((["key", "s"], "ZSTD"), (["key", "x", "m"], "UNCOMPRESSED")):
        tq.export_table(rows, tmp_path / "a.parquet", columns=columns, overwrite=True)
        group = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0)
        assert {group.column(at).compression for at in range(group.num_columns)} == {wanted}


def test_a_partition_without_rows_is_a_file_without_rows(tmp_path: Path) -> None:
    tq.get_client().set_partition("nothing", size=4)
    assert tq.export_table("nothing", tmp_path / "a.parquet")["rows"] == 0
    assert pq.read_table(tmp_path / "a.parquet").num_rows == 0
    assert tq.export_table("nothing", tmp_path / "d", format="hf")["files"] == 1
    tq.export_table("nothing", tmp_path / "disk", format="hf-disk")
    stream = pa.ipc.open_stream(tmp_path / "disk" / "data-00000-of-00001.arrow")
    assert [batch.num_rows for batch in stream] == [0]


def test_only_some_columns(rows: str, tmp_path: Path) -> None:
    tq.export_table(rows, tmp_path / "a.parquet", columns=["key", "x", "key"])
    assert pq.read_table(tmp_path / "a.parquet").schema.names == ["key", "x"]


def test_bad_input_is_refused_before_anything_is_written(rows: str, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(UnknownRows):
        tq.export_table("nowhere", tmp_path / "a.parquet")
    with pytest.raises(InvalidInput, match="format 'csv'"):
        tq.export_table(rows, tmp_path / "a.csv", format="csv")
    monkeypatch.chdir(tmp_path)
    for url in ("s3://bucket/a.parquet", "memory://a"):
        with pytest.raises(InvalidInput, match="is no path of this machine"):
            tq.export_table(rows, url)
    with pytest.raises(InvalidInput, match=r"'a\.CSV': exports are Parquet"):
        tq.export_table(rows, tmp_path / "a.CSV")
    with pytest.raises(InvalidInput, match="no column 'y'"):
        tq.export_table(rows, tmp_path / "a.parquet", columns=["y"])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(NotSupported, match=r"transfer-queue\[parquet\]"):
        tq.export_table(rows, tmp_path / "a.parquet")
    assert os.listdir(tmp_path) == []


def test_the_command_writes_a_file_and_says_what(rows: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    done = command("export", rows, str(path), "--column", "key", "--column", "s", "--json")
    assert json.loads(done.stdout) == {"rows": 101, "files": 1, "bytes": path.stat().st_size}
    assert pq.read_table(path).schema.names == ["key", "s"]
    again = command("export", rows, str(path))
    assert (again.returncode, again.stderr.startswith("tq: ")) == (1, True)
    assert "101 rows" in command("export", rows, str(path), "--overwrite").stdout
    nowhere = command("export", rows, str(tmp_path / "no" / "a.parquet"))
    assert (nowhere.returncode, "No such file" in nowhere.stderr) == (1, True)


def test_what_a_killed_export_left_goes_with_the_next(rows: str, tmp_path: Path, child: Callable[[str], Child]) -> None:
    path = tmp_path / "a.parquet"
    killed = child(f"""
        import os, signal, transfer_queue as tq
        from transfer_queue.tables.export import ExportForm, export
        tq.init()
        kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        export(tq.get_client().session, {rows!r}, {str(path)!r}, ExportForm(progress=kill))
    """)
    until(lambda: killed.process.poll() is not None, "its end")
    assert len(os.listdir(tmp_path)) == 1
    tq.export_table(rows, path)
    assert os.listdir(tmp_path) == ["a.parquet"]
