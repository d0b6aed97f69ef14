"""Messages about versions of weights: which one is live, and how many rows may be started. Part of the unions in
`messages`."""

from __future__ import annotations

import msgspec

from transfer_queue.wire.messages.base import Reply, Request, Seconds


class Announce(Request):
    """`version` of trainer life `epoch` is committed: rows of those before are one announcement older (`Counted`)."""

    epoch: str
    version: int


class Admit(Request):
    """Permission to start `count` more rows for `task` (`Admitted`); parks until they will not be too old when they are
    used. None: what the service was started with."""

    task: str
    count: int
    max_age: int | None
    rows_per_version: int | None
    timeout_s: Seconds


class GiveBack(Request):
    """`count` rows that were admitted for `task` will never come."""

    task: str
    count: int


class Counted(Reply):
    """`count` versions were announced so far, that one included."""

    count: int


class Admitted(Reply):
    task: str
    count: int


class Policy(msgspec.Struct, frozen=True):
    """What holds for every task that asks for nothing else. `max_age` None: any. `untagged`: "accept" or "refuse" rows
    that do not say what made them. `rows_per_version`: how many rows a task uses for each version (for `admit`)."""

    max_age: int | None = None
    untagged: str = "accept"
    rows_per_version: int | None = None
