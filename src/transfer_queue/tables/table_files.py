"""New files with rows of a table: Parquet, and streams of Arrow.

`ParquetFile` is encoded by polars: lists of numbers take pyarrow 2.6 times its processor time (docs/benchmarks.md).
polars has threads of its own. Batches go to them by a thread of ours, so that whoever reads the rows is in the thread
that called, where an interrupt arrives.
"""

from __future__ import annotations

import base64
import os
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from transfer_queue.tables.partition_table import KEY

HELD_NBYTES = 64 << 20  # given, and not taken by polars: the caller waits with more
GROUP_NBYTES = 32 << 20  # of a row group, as far as the first rows tell
UNEVEN = 8  # a row group with so many times as many bytes is not waited for: polars holds it in memory
MOST_GROUP_ROWS = 65536
OS_ERROR = re.compile(r"\(os error (\d+)\)")


class TableFile:
    """A new file, of which every byte is on the disk when the context ends without an error.

    Raises OSError for what went wrong with batches given before.
    """

    suffix: str

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.rows = 0
        self.nbytes = 0  # of the batches given so far
        self.is_uneven = False  # it should be ended: more rows would need too much memory
        self._schema = schema

    def __enter__(self) -> TableFile:
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Blocks while many bytes wait to be written. The batch must not change before the file has ended."""
        self.rows += batch.num_rows
        self.nbytes += batch.nbytes

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        raise NotImplementedError


class ArrowFile(TableFile):
    """A stream of Arrow, with a batch also where there are no rows: Hugging Face expects one."""

    suffix = ".arrow"

    def __enter__(self) -> TableFile:
        self._file = open(self.path, "wb")
        self._writer = pa.ipc.new_stream(self._file, self._schema)
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        super().write(batch)
        self._writer.write_batch(batch)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._file:
            if error is not None:
                return
            if not self.rows:
                self.write(pa.RecordBatch.from_pylist([], self._schema))
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())


class ParquetFile(TableFile):
    """Texts by dictionary, with statistics. All is compressed where there are columns of texts, nothing where there
    are only numbers: that costs more than it saves.

    All row groups but the last have `group_rows`. 0: as many as the first rows say that `GROUP_NBYTES` have.
    """

    suffix = ".parquet"

    def __init__(self, path: Path, schema: pa.Schema, group_rows: int = 0) -> None:
        super().__init__(path, schema)
        self.group_rows = group_rows
        self._first: list[pa.RecordBatch] = []  # before their size is known
        self._sink: BatchSink | None = None
        self._group = (0, 0.0)  # rows and bytes of the row group that is open

    def write(self, batch: pa.RecordBatch) -> None:
        super().write(batch)
        if self._sink is not None:
            self._give(self._sink, batch)
            return
        self._first.append(batch)
        if self.nbytes >= GROUP_NBYTES:
            self._begin()

    def _begin(self) -> BatchSink:
        fitting = GROUP_NBYTES * self.rows // max(1, self.nbytes)
        self.group_rows = self.group_rows or max(1, min(fitting, MOST_GROUP_ROWS))
        sink = self._sink = BatchSink(self.path, self._schema, self.group_rows)
        weakref.finalize(self, sink.drop)  # one that an interrupt left keeps no thread
        sink.start()
        for batch in self._first:
            self._give(sink, batch)
        self._first.clear()
        return sink

    def _give(self, sink: BatchSink, batch: pa.RecordBatch) -> None:
        rows, nbytes = self._group[0] + batch.num_rows, self._group[1] + batch.nbytes
        groups = max(1, rows / self.group_rows)
        self.is_uneven |= nbytes > groups * UNEVEN * GROUP_NBYTES
        if rows >= self.group_rows:
            rows %= self.group_rows
            nbytes = batch.nbytes * rows / batch.num_rows
        self._group = (rows, nbytes)
        sink.add(batch)

    def abandon(self) -> None:
        """It is of no use: its end waits for nothing."""
        if self._sink is not None:
            self._sink.drop()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            (self._sink or self._begin()).end()
        elif self._sink is not None:
            self._sink.drop()
            self._sink.join()


class BatchSink:
    """Batches on their way to the thread in which polars writes a file of them. Without locks: an interrupt may strike
    as Python has taken one, and its thread then holds it for good."""

    def __init__(self, path: Path, schema: pa.Schema, group_rows: int) -> None:
        self._path, self._schema, self._group_rows = path, schema, group_rows
        self._given: SimpleQueue[pa.RecordBatch | None] = SimpleQueue()
        self._taken: SimpleQueue[int] = SimpleQueue()  # how many bytes those have that polars took
        self._held_nbytes = 0  # as far as who gives has heard
        self._is_dropped = self._is_over = self._is_whole = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="tq-export", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, batch: pa.RecordBatch) -> None:
        """Blocks while more than `HELD_NBYTES` are waiting."""
        while self._held_nbytes > HELD_NBYTES and not self._is_over:
            self._held_nbytes -= self._taken.get()
        if self._is_over:
            self.join()
        self._given.put(batch)
        self._held_nbytes += batch.nbytes

    def end(self) -> None:
        """No more will come; the file is whole and on the disk when this returns."""
        self._given.put(None)
        self.join()

    def drop(self) -> None:
        """Write nothing any more, also of what is given yet."""
        self._is_dropped = True
        self._given.put(None)

    def join(self) -> None:
        """Wait for the end of the thread. Raises what it ended of, unless it was told to."""
        has_ended = self._thread.ident is None  # an interrupt struck before it began: it ends by itself
        try:
            if not has_ended:
                self._thread.join()
                has_ended = True
        finally:
            if not has_ended:  # an interrupt: what waits is in vain
                self.drop()
        if not self._is_whole and not self._is_dropped:
            raise self._failed or OSError(f"nothing writes {self._path} any more")

    def _frames(self, *pushed_down: Any) -> Iterator[pl.DataFrame]:
        while (batch := self._given.get()) is not None and not self._is_dropped:
            yield _frame(batch)
            self._taken.put(batch.nbytes)
        if self._is_dropped:
            raise InterruptedError("the export was given up")

    def _write(self) -> None:
        """All that comes, until the end."""
        has_texts = any(pa.types.is_large_string(field.type) and field.name != KEY for field in self._schema)
        try:
            register_io_source(self._frames, schema=_frame(self._schema.empty_table()).schema).sink_parquet(
                self._path,
                compression="zstd" if has_texts else "uncompressed",
                compression_level=1 if has_texts else None,
                row_group_size=self._group_rows,
                sync_on_close="all",
                arrow_schema=pa.schema([field.with_type(_widened(field.type)) for field in self._schema]),
                metadata={"ARROW:schema": base64.b64encode(self._schema.serialize().to_pybytes()).decode()},
            )
            self._is_whole = True
        except (OSError, pl.exceptions.PolarsError, KeyboardInterrupt) as error:  # polars looks for interrupts anywhere
            self._failed = _as_os_error(error)
        finally:
            self._is_over = True
            self._taken.put(0)  # who waits looks again


def _frame(rows: pa.RecordBatch | pa.Table) -> pl.DataFrame:
    found = pl.from_arrow(rows)
    assert isinstance(found, pl.DataFrame)
    return found


def _widened(found: pa.DataType) -> pa.DataType:
    """The type that polars has for it. Readers of Arrow are told the narrow one, in the metadata of the file."""
    if pa.types.is_fixed_size_list(found):
        return pa.list_(_widened(found.value_type), found.list_size)
    if pa.types.is_list(found):
        return pa.large_list(_widened(found.value_type))
    return found


def _as_os_error(error: BaseException) -> BaseException:
    """polars gives what the system said as a text, with its number."""
    number = OS_ERROR.search(str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else error
