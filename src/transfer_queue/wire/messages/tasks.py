"""Rows that a task gets, and what it has had."""

from __future__ import annotations

from typing import Any

from transfer_queue.wire.messages.base import Reply, Request, Seconds
from transfer_queue.wire.messages.reads import Located
from transfer_queue.wire.messages.rows import RowSet

ALL = -(1 << 62)  # rows of a `Fetch`: all that were declared to have its fields; no number that a caller writes


class Fetch(Request):
    """Hand `batch_size` ready rows to `task`; parks until the sampler is satisfied. With `ALL` rows the sampler is not
    asked: it parks until as many are ready as were declared (`SetPartition`), and they are all handed out.

    With `lease_s` the rows are lent to the session `holder` (b"": the asker's) until they are acknowledged. With
    `until_done` the answer is empty once every row is used or lent to that holder, and there are as many as declared.
    With `locate` the answer is `Handed`: it has where the cells are as well. With `carry` it is where the cells are few
    and ride with the answer; it pins nothing then.

    With `dp_size` the rows are dealt to that many ranks at once, `batch_size` to each, and `sampling` says whose share
    (`dp_rank`) of which batch (`batch_index`) this is. `used`: rows of that share that were used before and are not
    wanted again. With `until_cleared` the answer is also empty where the partition is gone.
    """

    partition: str
    fields: list[str]
    batch_size: int
    task: str
    sampling: dict[str, Any]
    timeout_s: Seconds
    empty_on_timeout: bool
    lease_s: Seconds = 0.0
    until_done: bool = False
    holder: bytes = b""
    locate: bool = False
    waited_s: Seconds = 0.0  # with earlier requests for the same rows
    dp_size: int = 0
    used: int = 0
    until_cleared: bool = False
    carry: bool = False


class Handed(Reply):
    """Rows of a task, and their cells as a `Get` of them would give; the payload is that of `located`.

    They were handed out so many seconds after the server had the request (`after_s`).
    """

    rows: RowSet
    located: Located
    after_s: Seconds = 0.0


class Scan(Request):
    """Every row of a partition with its readiness over `fields`."""

    partition: str
    fields: list[str]


class ListTags(Request):
    """Every row of a partition with its values of the tags called `names` (`TagColumns`)."""

    partition: str
    names: list[str]


class TagColumns(Reply):
    """`columns` has a list for each of the tags asked for: the value of each row, None where it has none. `names`:
    where none were asked for, those that rows have, in order of appearance."""

    rows: bytes
    columns: list[list[Any]]
    names: list[str]


class Consumption(Request):
    partition: str
    task: str


class Production(Request):
    partition: str
    fields: list[str]


class ResetConsumption(Request):
    partition: str
    task: str | None


class RowStatus(Reply):
    """`status` int8 (n,) or (n, fields) of n rows; `known` is False for an unknown partition or field.

    `runs` is int64 (k, 2): runs of ascending indexes as (first, number). `cleared`: how many more of the declared rows
    were there.
    """

    known: bool
    num_rows: int
    runs: bytes
    status: bytes
    declared: int | None
    cleared: int = 0
