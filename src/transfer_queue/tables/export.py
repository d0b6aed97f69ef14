"""A partition as Parquet, read and written in batches.

    FILE.parquet         one file
    DIR/                 data-00000.parquet and so on, each of about `SHARD_NBYTES`
    DIR/ as a dataset    data/train-00000-of-00003.parquet and so on, with dataset_info.json: what
                         `datasets.load_dataset` of Hugging Face takes for the split "train"
    DIR/ as one on disk  data-00000-of-00003.arrow and so on, with dataset_info.json and state.json: what
                         `datasets.load_from_disk` maps

A batch is a row group of Parquet, or a batch of a stream of Arrow. Everything is written beside its place, brought to
the disk, and renamed.
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
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from transfer_queue.arguments import flag, text
from transfer_queue.client.session import Session
from transfer_queue.errors import InvalidInput
from transfer_queue.memory.memfd import sync_directory
from transfer_queue.saved.full_disk import named_in_errors
from transfer_queue.saved.local import new_directory
from transfer_queue.saved.places import is_url
from transfer_queue.tables.partition_table import PartitionTable, table
from transfer_queue.tables.table_files import UNEVEN, ArrowFile, ParquetFile, TableFile

FORMATS = PARQUET, HUGGING_FACE, SAVED = "parquet", "hf", "hf-disk"
SHARD_NBYTES = 500 << 20
SUFFIX = ".parquet"
Progress: TypeAlias = Callable[[int, int], None]
OTHER_FILES = {".csv", ".tsv", ".json", ".jsonl", ".arrow", ".feather", ".xlsx", ".pq", ".gz", ".zip", ".db"}


class ExportForm(NamedTuple):
    """How to write: see `transfer_queue.export_table`. `progress` is told how many rows are written and how many to."""

    format: str = PARQUET
    columns: Sequence[str] | None = None
    as_bytes: Sequence[str] = ()
    preview_chars: int | None = None
    overwrite: bool = False
    progress: Progress | None = None


def export(session: Session, partition_id: str, target: str | os.PathLike[str], wanted: ExportForm) -> dict[str, int]:
    """See `transfer_queue.export_table`."""
    overwrite = flag(wanted.overwrite, "overwrite")
    if text(wanted.format, "format") not in FORMATS:
        raise InvalidInput(f"format {wanted.format!r:.80}: expected one of {', '.join(FORMATS)}")
    if is_url(target):
        raise InvalidInput(f"{target!s:.200} is no path of this machine: export to one, and copy what is there")
    place = Path(os.path.realpath(target))
    if place.suffix.lower() in OTHER_FILES:
        raise InvalidInput(f"{place.name!r:.200}: exports are Parquet, to a FILE.parquet or to a directory")
    is_file = place.suffix == SUFFIX and wanted.format == PARQUET
    if os.path.lexists(place) and not (is_file and overwrite and place.is_file()):
        raise FileExistsError(f"{place} exists" + ("" if is_file else ": a directory is never replaced"))
    found = table(session, partition_id, as_bytes=wanted.as_bytes, preview_chars=wanted.preview_chars)
    if wanted.columns is not None:
        found = found.select(wanted.columns)
    write = {PARQUET: _directory, HUGGING_FACE: _dataset, SAVED: _saved_dataset}[wanted.format]
    with named_in_errors(place):
        if is_file:
            return _one_file(place, found, wanted.progress, overwrite)
        return write(place, found, _told(found, wanted.progress))


def _told(found: PartitionTable, progress: Progress | None) -> Iterator[pa.RecordBatch]:
    done = 0
    for batch in found.batches():
        yield batch
        done += batch.num_rows
        if progress is not None:
            progress(done, len(found))


def _one_file(place: Path, found: PartitionTable, progress: Progress | None, overwrite: bool) -> dict[str, int]:
    with _drafted(place) as draft:
        file, is_whole = _written(draft, found, progress, 0)
        while not is_whole:
            file, is_whole = _written(draft, found, progress, max(1, file.group_rows // UNEVEN))
        if not overwrite and os.path.lexists(place):
            raise FileExistsError(f"{place} exists")
        os.replace(draft, place)
    sync_directory(place.parent)
    return {"rows": file.rows, "files": 1, "bytes": place.stat().st_size}


def _written(
    draft: Path, found: PartitionTable, progress: Progress | None, group_rows: int
) -> tuple[ParquetFile, bool]:
    """The file, and whether all is in it. Not where later rows turn out much larger than the first: row groups of that
    many rows would need too much memory."""
    file = ParquetFile(draft, found.schema, group_rows)
    with file:
        for batch in _told(found, progress):
            if file.is_uneven:
                file.abandon()
                return file, False
            file.write(batch)
    return file, True


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
        told = _counts(_shards(draft, "data-{:05d}", found, batches, ParquetFile))
        sync_directory(draft)
    return told


def _dataset(place: Path, found: PartitionTable, batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
    """What `datasets.load_dataset` reads."""
    with new_directory(place) as draft:
        data = draft / "data"
        data.mkdir()
        written = _numbered(data, "train", _shards(data, "train-{:05d}", found, batches, ParquetFile))
        sync_directory(data)
        told = _counts(written)
        split = {"name": "train", "num_bytes": told["bytes"], "num_examples": told["rows"], "dataset_name": place.name}
        _write_json(draft / "dataset_info.json", {
            **_about(found), "dataset_name": place.name,
            "splits": {"train": split}, "dataset_size": told["bytes"], "download_size": told["bytes"],
        })  # fmt: skip
        sync_directory(draft)
    return told


def _saved_dataset(place: Path, found: PartitionTable, batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
    """What `Dataset.save_to_disk` writes, and `datasets.load_from_disk` maps."""
    with new_directory(place) as draft:
        written = _numbered(draft, "data", _shards(draft, "data-{:05d}", found, batches, ArrowFile))
        _write_json(draft / "dataset_info.json", {**_about(found), "citation": "", "homepage": "", "license": ""})
        _write_json(draft / "state.json", {
            "_data_files": [{"filename": file.path.name} for file in written], "_fingerprint": secrets.token_hex(8),
            "_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False,
            "_split": "train",
        })  # fmt: skip
        told = _counts(written)
        sync_directory(draft)
    return told


def _about(found: PartitionTable) -> dict[str, Any]:
    return {"description": f"Partition {found.partition_id!r:.200} of transfer_queue"}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(values, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _numbered(directory: Path, name: str, written: list[TableFile]) -> list[TableFile]:
    """The files, called as Hugging Face calls those of a dataset, now that their number is known."""
    for number, file in enumerate(written):
        file.path = file.path.rename(directory / f"{name}-{number:05d}-of-{len(written):05d}{file.suffix}")
    return written


def _shards(
    directory: Path, name: str, found: PartitionTable, batches: Iterator[pa.RecordBatch],
    kind: type[TableFile],
) -> list[TableFile]:  # fmt: skip
    """At least one file, also where there are no rows."""
    written: list[TableFile] = []
    following = next(batches, None)
    while following is not None or not written:
        with kind(directory / (name.format(len(written)) + kind.suffix), found.schema) as file:
            written.append(file)
            while following is not None and not (file.is_uneven or file.nbytes >= SHARD_NBYTES):
                file.write(following)
                following = next(batches, None)
    return written


def _counts(written: Sequence[TableFile]) -> dict[str, int]:
    return {
        "rows": sum(file.rows for file in written),
        "files": len(written),
        "bytes": sum(file.path.stat().st_size for file in written),
    }
