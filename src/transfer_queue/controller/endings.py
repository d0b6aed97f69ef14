"""When a loop over a partition has come to its end, and which rows are its last."""

from __future__ import annotations

from transfer_queue.controller.readiness import ReadyView
from transfer_queue.controller.table import Table
from transfer_queue.wait_queue import Waiter
from transfer_queue.wire.messages import Fetch


def holder_of(request: Waiter[Fetch]) -> bytes:
    """The session that has what it is given."""
    return request.message.holder or request.session


def has_begun(message: Fetch) -> bool:
    """Whether the loop that asks had rows before, of this batch or another."""
    return bool(message.until_cleared or message.used or message.sampling.get("batch_index"))


def is_complete(table: Table, message: Fetch) -> bool:
    """Whether all rows that a loop is to get were there. Where no size was declared and none is left, only a loop that
    had some may think so."""
    if table.declared is None and not table.num_rows and not has_begun(message):
        return False
    return table.is_whole


def is_produced(table: Table, name: str, view: ReadyView) -> bool:
    """Whether every row has the fields of `view`, or was taken by the task, and as many as declared were there. Without
    a declared size more may come."""
    task = table.task(name)
    num_taken = task.num_consumed + task.num_lent
    return table.num_rows > 0 and table.is_filled and view.count + num_taken >= table.num_rows


def rest(message: Fetch, table: Table, view: ReadyView) -> int:
    """How many rows a request `until_done` gets when they are the last ones and too few for a batch; else 0."""
    if not message.until_done or not 0 < view.count < message.batch_size or not table.is_filled:
        return 0
    task = table.task(message.task)
    return view.count if view.count == table.num_rows - task.num_consumed else 0
