"""A partition as Parquet, read and written in batches.

    FILE.parquet       one file
    DIR/               data-00000.parquet and so on, each of about `SHARD_NBYTES`
    DIR/ as a dataset  data/train-00000-of-00003.parquet and so on, with dataset_info.json: what `datasets.load_dataset`
                       of Hugging Face takes for the split "train"

A batch is a row group. Everything is written beside its place, brought to the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from transfer_queue.client.session import Session
from transfer_queue.errors import InvalidInput
from transfer_queue.memory.memfd import sync_directory
from transfer_queue.saved.local import new_directory
from transfer_queue.saved.places import is_url
from transfer_queue.tables.partition_table import PartitionTable, table

FORMATS = PARQUET, HUGGING_FACE = "parquet", "hf"
SHARD_NBYTES = 500 << 20
SUFFIX = ".parquet"


class ExportForm(NamedTuple):
    """How to write: see `transfer_queue.export_table`. `progress` is told how many rows are written and how many to."""

    format: str = PARQUET
    columns: Sequence[str] | None = None
    as_bytes: Sequence[str] = ()
    preview_chars: int | None = None
    overwrite: bool = False
    progress: Callable[[int, int], None] | None = None


def export(session: Session, partition_id: str, target: str | os.PathLike[str], wanted: ExportForm) -> dict[str, int]:
    """See `transfer_queue.export_table`."""
    if wanted.format not in FORMATS:
        raise InvalidInput(f"format {wanted.format!r:.80}: expected one of {', '.join(FORMATS)}")
    if is_url(target):
        raise InvalidInput(f"{target!s:.200} is no path of this machine: export to one, and copy what is there")
    place = Path(os.path.realpath(target))
    is_file = place.suffix == SUFFIX and wanted.format == PARQUET
    if os.path.lexists(place) and not (is_file and wanted.overwrite and place.is_file()):
        raise FileExistsError(f"{place} exists" + ("" if is_file else ": a directory is never replaced"))
    found = table(session, partition_id, as_bytes=wanted.as_bytes, preview_chars=wanted.preview_chars)
    if wanted.columns is not None:
        found = found.select(wanted.columns)
    batches = _told(found, wanted.progress)
    if is_file:
        return _one_file(place, found, batches, wanted.overwrite)
    return _dataset(place, found, batches) if wanted.format == HUGGING_FACE else _directory(place, found, batches)


def _told(found: PartitionTable, progress: Callable[[int, int], None] | None) -> Iterator[pa.RecordBatch]:
    done = 0
    for batch in found.batches():
        yield batch
        done += batch.num_rows
        if progress is not None:
            progress(done, len(found))


def _one_file(place: Path, found: PartitionTable, batches: Iterator[pa.RecordBatch], overwrite: bool) -> dict[str, int]:
    with _drafted(place) as draft:
        with ParquetFile(draft, found.schema) as file:
            for batch in batches:
                file.write(batch)
        if not overwrite and os.path.lexists(place):
            raise FileExistsError(f"{place} exists")
        os.replace(draft, place)
    sync_directory(place.parent)
    return {"rows": file.rows, "files": 1, "bytes": place.stat().st_size}


@contextlib.contextmanager
def _drafted(place: Path) -> Iterator[Path]:
    """An empty file beside the place, locked for this export; gone on an error. What killed ones left goes too."""
    with contextlib.ExitStack() as held:
        draft = None
        while draft is None or _locked(draft, held) is False:  # somebody took it for one of a killed export
            draft = place.with_name(f"{_draft_prefix(place)}{secrets.token_hex(8)}.tmp")
            draft.touch(exist_ok=False)
        try:
            _remove_left(place)
            yield draft
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
            raise


def _draft_prefix(place: Path) -> str:
    """As much of the name as leaves space for the rest: a file system counts bytes."""
    return f".{os.fsencode(place.name)[:200].decode(errors='ignore')}."


def _remove_left(place: Path) -> None:
    """Drafts that nobody holds: their exports were killed."""
    name = re.compile(re.escape(_draft_prefix(place)) + "[0-9a-f]{16}[.]tmp")
    for one in [one for one in place.parent.iterdir() if name.fullmatch(one.name)]:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            if _locked(one, held):
                one.unlink()


def _locked(draft: Path, held: contextlib.ExitStack) -> bool | None:
    """Hold the lock of that file. False where somebody else does, or it is gone; None where files have no locks."""
    try:
        file = held.enter_context(open(draft, "rb"))  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.stat(draft), os.fstat(file.fileno()))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # of some network file systems
        return None


def _directory(place: Path, found: PartitionTable, batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
    with new_directory(place) as draft:
        written = _shards(draft, "data-{:05d}" + SUFFIX, found, batches)
        sync_directory(draft)
    return _counts(written)


def _dataset(place: Path, found: PartitionTable, batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
    with new_directory(place) as draft:
        data = draft / "data"
        data.mkdir()
        written = _shards(data, "train-{:05d}" + SUFFIX, found, batches)
        for number, file in enumerate(written):
            os.rename(file.path, data / f"train-{number:05d}-of-{len(written):05d}{SUFFIX}")
        sync_directory(data)
        told = _counts(written)
        split = {"name": "train", "num_bytes": told["bytes"], "num_examples": told["rows"], "dataset_name": place.name}
        about = {
            "description": f"Partition {found.partition_id!r:.200} of transfer_queue", "dataset_name": place.name,
            "splits": {"train": split}, "dataset_size": told["bytes"], "download_size": told["bytes"],
        }  # fmt: skip
        with open(draft / "dataset_info.json", "w", encoding="utf-8", errors="backslashreplace") as info:
            json.dump(about, info, indent=2)
            info.flush()
            os.fsync(info.fileno())
        sync_directory(draft)
    return told


def _shards(directory: Path, name: str, found: PartitionTable, batches: Iterator[pa.RecordBatch]) -> list[ParquetFile]:
    """At least one file, also where there are no rows."""
    written: list[ParquetFile] = []
    following = next(batches, None)
    while following is not None or not written:
        with ParquetFile(directory / name.format(len(written)), found.schema) as file:
            written.append(file)
            while following is not None and (not file.rows or file.nbytes < SHARD_NBYTES):
                file.write(following)
                following = next(batches, None)
    return written


def _counts(written: Sequence[ParquetFile]) -> dict[str, int]:
    return {
        "rows": sum(file.rows for file in written),
        "files": len(written),
        "bytes": sum(file.nbytes for file in written),
    }


class ParquetFile:
    """A new file, of which every byte is on the disk when the context ends without an error."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.rows = 0
        self._schema = schema

    def __enter__(self) -> ParquetFile:
        self._file = open(self.path, "wb", buffering=0)
        try:
            self._writer = pq.ParquetWriter(self._file, self._schema, **_encoding(self._schema))
        except BaseException:
            self._file.close()
            raise
        return self

    @property
    def nbytes(self) -> int:
        """Bytes written so far."""
        return self._file.tell() if not self._file.closed else self.path_nbytes

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)
        self.rows += batch.num_rows

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._writer.close()
            if error is None:
                os.fsync(self._file.fileno())
        finally:
            self.path_nbytes = self._file.tell()
            self._file.close()


def _encoding(schema: pa.Schema) -> dict[str, Any]:
    """Texts by dictionary and compressed. Numbers as they are: to compress floats costs more than it saves."""
    text = [field.name for field in schema if pa.types.is_large_string(field.type)]
    return {
        "use_dictionary": [name for name in text if "." not in name],
        "compression": {name: "zstd" if name in text else "none" for name in schema.names},
        "write_statistics": text,
    }
