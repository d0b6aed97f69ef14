"""Checks who got which rows: every row to each task once, or to one living lease at a time until one acknowledges it.

Rows are the names that their writers gave them. An operation of unknown outcome took effect after its start, or never
(see `histories`); of a fetch like that nobody knows the rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from histories import Record, Violation


@dataclass(frozen=True, kw_only=True)
class Insert(Record):
    """New rows, all at once, ready for every task."""

    rows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Fetch(Record):
    """`size` rows for a task: taken for good, or with a lease lent for `lease_s` seconds to the process."""

    task: str
    size: int
    lease_s: float = 0.0
    rows: tuple[str, ...] = ()
    lease: int = 0


@dataclass(frozen=True, kw_only=True)
class Ack(Record):
    """Rows of a lease are used. Refused: the lease was over."""

    task: str
    lease: int
    rows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Release(Ack):
    """Rows of a lease are given back."""


@dataclass(frozen=True, kw_only=True)
class End(Record):
    """The process ends, or leaves: from the start on its leases may be over, at the end they are."""


class Account:
    """What happened to one row in one task."""

    def __init__(self) -> None:
        self.taken: list[Fetch] = []
        self.lent: list[Fetch] = []
        self.acks: list[Ack] = []
        self.releases: list[Release] = []

    def of_lease(self, lease: int) -> Iterator[Ack]:
        return (record for record in (*self.acks, *self.releases) if record.lease == lease)


def check_rows(
    history: Iterable[Record], drained: Collection[str] = (), fetches_are_undone: bool = False, slack_s: float = 0.0
) -> list[Violation]:
    """`drained`: tasks whose every remaining row was fetched after all leases were over and all writers had ended.

    A plain fetch of unknown outcome may have taken as many rows as it asked for, of which nobody hears again; with
    `fetches_are_undone` it took none. `slack_s`: how much later than its time a lease may be found to be over.
    """
    records = list(history)
    inserts = {row: record for record in records if isinstance(record, Insert) for row in record.rows}
    ends = {record.process: record for record in records if isinstance(record, End)}
    accounts: dict[tuple[str, str], Account] = defaultdict(Account)
    for record in records:
        for row in record.rows if isinstance(record, (Fetch, Ack)) else ():
            account = accounts[record.task, row]
            if isinstance(record, Fetch):
                if record.outcome == "ok":
                    (account.lent if record.lease else account.taken).append(record)
            else:
                (account.releases if isinstance(record, Release) else account.acks).append(record)
    found = [*_origins(records, inserts)]
    for (task, row), account in accounts.items():
        subject = f"row {row} of task {task}"
        found += _grants(subject, account, ends)
        found += _acks(subject, account, ends, slack_s)
    found += _refusals(records, ends)
    for task in sorted(drained):
        found += _losses(task, records, accounts, 0 if fetches_are_undone else _unseen(records, task))
    return found


def _origins(records: Iterable[Record], inserts: dict[str, Insert]) -> Iterator[Violation]:
    for fetch in records:
        for row in fetch.rows if isinstance(fetch, Fetch) and fetch.outcome == "ok" else ():
            insert = inserts.get(row)
            if insert is None or insert.outcome == "refused":
                culprits = (fetch,) if insert is None else (insert, fetch)
                yield Violation("grant of a row never put", f"row {row}", f"task {fetch.task} got it", culprits)
            elif fetch.ended < insert.started:
                yield Violation("grant before the put", f"row {row}", f"task {fetch.task} got it", (fetch, insert))


def _held_until(lent: Fetch, account: Account, ends: dict[str, End]) -> float:
    """Until when the row is certainly on lease. It is so from the end of the fetch on."""
    over = [record.started for record in account.of_lease(lent.lease) if record.outcome != "refused"]
    if lent.process in ends:
        over.append(ends[lent.process].started)
    return min(lent.started + lent.lease_s, *over, math.inf)


def _grants(subject: str, account: Account, ends: dict[str, End]) -> Iterator[Violation]:
    """Two grants are right when one of them can have been over before the other: nobody knows which came first."""
    grants = [(taken, math.inf) for taken in account.taken]
    grants += [(lent, _held_until(lent, account, ends)) for lent in account.lent]
    for (one, one_until), (other, other_until) in combinations(grants, 2):
        if one_until > other.ended and other_until > one.ended:
            leased = (other.lease and other.started <= one.ended) or one.lease
            name = "granted while another lease lives" if leased else "granted twice"
            yield Violation(name, subject, "", (one, other))
    for ack in account.acks:
        for grant in (*account.lent, *account.taken):
            if ack.outcome == "ok" and grant.started > ack.ended:
                yield Violation("granted after its ack", subject, "", (ack, grant))


def _acks(subject: str, account: Account, ends: dict[str, End], slack_s: float) -> Iterator[Violation]:
    good = [ack for ack in account.acks if ack.outcome == "ok"]
    for one, other in combinations(good, 2):
        if one.lease != other.lease:
            yield Violation("acked twice", subject, "by two leases", (one, other))
    for ack in good:
        lent = next((fetch for fetch in account.lent if fetch.lease == ack.lease), None)
        if lent is None:
            yield Violation("ack of a row that was not lent", subject, f"lease {ack.lease}", (ack,))
            continue
        for later in (*account.lent, *account.taken):
            if later.started > lent.ended and later.ended < ack.started:
                yield Violation("ack of a dead lease", subject, "it went to another before", (lent, later, ack))
        for release in account.releases:
            if release.lease == ack.lease and release.outcome == "ok" and release.ended < ack.started:
                yield Violation("ack of a dead lease", subject, "it was given back before", (release, ack))
        repeated = any(a is not ack and a.lease == ack.lease and a.outcome != "refused" for a in account.acks)
        if lent.ended + lent.lease_s + slack_s < ack.started and not repeated:
            yield Violation("ack of a dead lease", subject, "its time was over before", (lent, ack))
        if lent.process in ends and ends[lent.process].ended < ack.started and not repeated:
            yield Violation("ack of a dead lease", subject, "its holder had ended before", (lent, ack))


def _refusals(records: Iterable[Record], ends: dict[str, End]) -> Iterator[Violation]:
    """A lease is not over before its time, unless rows of it were given back or its holder went."""
    records = list(records)
    lent = {record.lease: record for record in records if isinstance(record, Fetch) and record.lease}
    given = {record.lease: record for record in records if isinstance(record, Release)}
    for record in records:
        if not isinstance(record, Ack) or record.outcome != "refused" or record.lease not in lent:
            continue
        fetch, end = lent[record.lease], ends.get(lent[record.lease].process)
        alive = record.ended < fetch.started + fetch.lease_s and (end is None or record.ended < end.started)
        released = given.get(record.lease)
        if alive and (released is None or released is record or released.started > record.ended):
            yield Violation("a living lease is refused", f"lease {record.lease}", "", (fetch, record))


def _unseen(records: Iterable[Record], task: str) -> int:
    """How many rows fetches of unknown outcome may have taken."""
    return sum(
        record.size
        for record in records
        if isinstance(record, Fetch) and record.task == task and record.outcome == "unknown" and not record.lease_s
    )


def _losses(
    task: str, records: Iterable[Record], accounts: dict[tuple[str, str], Account], allowed: int
) -> Iterator[Violation]:
    """Rows that were put, and that no fetch took and nobody acknowledged. A put of which a row was seen is whole."""
    seen = {row for (_, row), account in accounts.items() if account.taken or account.lent}
    missing = []
    for record in records:
        if isinstance(record, Insert) and (
            record.outcome == "ok" or (record.outcome == "unknown" and not seen.isdisjoint(record.rows))
        ):
            missing += [row for row in record.rows if not _settled(accounts.get((task, row)))]
    if len(missing) > allowed:
        some = ", ".join(missing[:20])
        yield Violation("lost row", f"task {task}", f"{len(missing)} of which at most {allowed} may be unseen: {some}")


def _settled(account: Account | None) -> bool:
    return account is not None and (bool(account.taken) or any(ack.outcome != "refused" for ack in account.acks))
