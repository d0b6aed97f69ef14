"""Results of attempts, several at a time: which of them are wanted, and which of the request's rows are theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from transfer_queue.controller.group_checks import MAX_TOKENS, named_rows, versions_of
from transfer_queue.controller.readiness import Slots
from transfer_queue.controller.table import Table
from transfer_queue.errors import GroupEnded, InvalidInput, RowCleared, StaleAttempt
from transfer_queue.groups import PoolCore, Result
from transfer_queue.groups.group import attempt_id
from transfer_queue.wire import messages as m
from transfer_queue.wire.arrays import indexes_of

MAX_ROWS = 1 << 24
Span = tuple[m.FinishedSlot, int, int]  # a result, and from where to where its rows are among those of the request


class SortedResults(NamedTuple):
    """`news`: results that are wanted and not known yet, and the places of their rows (`kept`). `late`: those that
    nobody may use, because another attempt took the place of theirs or the group has ended, and the places of their
    rows (`unwanted`)."""

    news: list[m.FinishedSlot]
    kept: Slots
    late: list[m.FinishedSlot]
    unwanted: Slots
    refused: list[m.RefusedSlot]


def sort_results(
    pool: PoolCore, finished: Sequence[m.FinishedSlot], num_rows: int, rows: Slots | None = None
) -> SortedResults:
    """Which of these results the pool wants, and does not know yet. Nothing is changed.

    `num_rows`: of the request. `rows`: their indexes, -1 for one that is not there; None: they are yet to be made.
    Raises `InvalidInput` for results that do not share the rows out, that repeat, or that mean nothing.
    """
    spans = list(_spans(finished, num_rows))
    there = np.zeros(0, np.int64) if rows is None else rows[rows >= 0]
    if len(np.unique(there)) < len(there):
        raise InvalidInput("a row is in the request twice")
    news, late, refused = [], [], []
    kept, unwanted = np.zeros(num_rows, bool), np.zeros(num_rows, bool)
    for place, (one, start, stop) in enumerate(spans):
        try:
            is_news = _check(pool, one, None if rows is None else rows[start:stop])
        except (GroupEnded, StaleAttempt, RowCleared) as error:
            refused.append(m.RefusedSlot(place, error.code, str(error)))
            if not isinstance(error, RowCleared):
                late.append(one)
                unwanted[start:stop] = True
        else:
            news += [one] * is_news
            kept[start:stop] = is_news
    return SortedResults(news, np.flatnonzero(kept), late, np.flatnonzero(unwanted), refused)


def enter(pool: PoolCore, results: SortedResults, rows: Slots) -> None:
    """Attempts have these results, and those that are wanted these rows in turn, as `sort_results` found them."""
    for one in results.late:
        pool.state.waste(one.group, attempt_id(one.slot, one.attempt), one.tokens)
    for one, start, stop in _spans(results.news, len(rows)):
        pool.done(one.group, one.slot, one.attempt, _result(pool, one, rows[start:stop]))


def finish_named(
    message: m.FinishSlots, pool: PoolCore, table: Table | None, clear: Callable[[list[int]], None]
) -> tuple[m.SlotsFinished, bool]:
    """The answer to results whose rows are there, and whether one was news. `clear` removes rows that nobody wants."""
    rows = named_rows(message, table)
    found = sort_results(pool, message.finished, len(rows), rows)
    enter(pool, found, rows[found.kept])
    kept = {row for one in found.late for row in pool.state.kept.get(one.group, ())}
    others = (pool.owners, pool.steps.owners, kept)
    clear([row for row in rows[found.unwanted].tolist() if row >= 0 and not any(row in known for known in others)])
    return m.SlotsFinished(message.rid, found.refused), bool(found.news)


def without_refused(message: m.Commit, kept: Slots) -> m.Commit:
    """The commit of these rows only. Blocks of shared cells that none of them has are not in it."""
    if len(kept) == message.count:
        return message
    tags = None if message.tags is None else [message.tags[place] for place in kept.tolist()]
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    shared = [one for cells in message.shared if (one := _cells_of(cells, kept)) is not None]
    return m.Commit(**values | {"count": len(kept), "tags": tags, "replaced": [], "shared": shared})


def new_blocks(message: m.Commit) -> list[int]:
    """Those that the commit fills."""
    return [message.block] * (message.block > 0) + [one.block for one in message.shared if one.is_new]


def left_out(message: m.Commit, kept: m.Commit) -> list[int]:
    """The new blocks of a commit that what is kept of it does not need."""
    return [block for block in new_blocks(message) if block not in new_blocks(kept)]


def _cells_of(cells: m.SharedCells, kept: Slots) -> m.SharedCells | None:
    """Those of the rows `kept` (ascending), which are counted anew."""
    rows, places = indexes_of(cells.rows), indexes_of(cells.places)
    have = np.isin(rows, kept)
    if not have.any():
        return None
    return replace(
        cells, rows=np.searchsorted(kept, rows[have]).astype(np.int64).tobytes(), places=places[have].tobytes()
    )


def _spans(finished: Sequence[m.FinishedSlot], num_rows: int) -> Iterator[Span]:
    if num_rows > MAX_ROWS:
        raise InvalidInput(f"results of {num_rows} rows in one call, at most {MAX_ROWS}")
    if len({(one.group, one.slot, one.attempt) for one in finished}) != len(finished):
        raise InvalidInput("the result of one attempt is in the request twice")
    if not all(0 <= one.tokens < MAX_TOKENS for one in finished):
        raise InvalidInput(f"results of {[one.tokens for one in finished]} tokens")
    if any(one.count < 0 for one in finished) or sum(one.count for one in finished) != num_rows:
        raise InvalidInput(f"results of {[one.count for one in finished]} rows each, and {num_rows} rows")
    stop = 0
    for one in finished:
        start, stop = stop, stop + one.count
        yield one, start, stop


def _check(pool: PoolCore, one: m.FinishedSlot, rows: Slots | None) -> bool:
    """Whether a result is news. Raises what is wrong with it."""
    if rows is not None and len(rows) and int(rows.min()) < 0:
        if one.group in pool.groups:
            pool.groups[one.group].slot(one.slot)  # which a group of an earlier pool may have had, and this one has not
        raise RowCleared(f"rows of slot {one.slot} of group {one.group!r} are not in the partition")
    versions_of(one, pool.group(one.group))
    return pool.check(one.group, one.slot, one.attempt, None if rows is None else _result(pool, one, rows))


def _result(pool: PoolCore, one: m.FinishedSlot, rows: Slots) -> Result:
    oldest, newest = versions_of(one, pool.group(one.group))
    return Result(rows.tolist(), one.reward, oldest, newest, one.tokens, one.info)
