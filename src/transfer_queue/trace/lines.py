"""The lines of a trace file, each a JSON array whose first item says what it is."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

FORMAT = 1
SUFFIX = ".jsonl"
WROTE, READ, USED = "w", "r", "u"  # what a span did to its rows; "" is none of these
MAX_NS = 1 << 62
Nanoseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_NS)]
Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=-MAX_NS, le=MAX_NS)]


class TraceHeader(msgspec.Struct, array_like=True, tag="process"):
    """The first line. `ident` tells processes apart, whatever their `pid`; `boot` names what CLOCK_MONOTONIC counts
    from. `monotonic_ns` and `wall_ns` are one instant."""

    format: int
    ident: str
    pid: int
    host: str
    boot: str
    name: str
    command: str
    monotonic_ns: Nanoseconds
    wall_ns: Nanoseconds


class TraceThread(msgspec.Struct, array_like=True, tag="thread"):
    """The name of a thread, and again with the names of those that had its number after it."""

    thread: int
    name: str


class TraceLoss(msgspec.Struct, array_like=True, tag="lost"):
    """So many spans of the process are in none of its files, in all."""

    spans: int


class TraceSpan(msgspec.Struct, array_like=True, tag="span"):
    """What was done, from `start_ns` on CLOCK_MONOTONIC on.

    `num_rows` counts all rows, `rows` and `keys` name them or a sample, see `rows`: ascending runs as (first, number),
    one after the other, and the row of each key, -1 where it is not known. `action` is what was done to them. `lease`:
    of the rows, below 0 of groups. `waited_ns` of the duration the service kept the request parked, or the request and
    its answer were on their way. `error`: the class of what was raised. `version`: of weights, with whose they are.
    `is_async`: others ran in the same thread meanwhile.
    """

    start_ns: Nanoseconds
    duration_ns: Nanoseconds
    thread: int
    name: str
    partition: str = ""
    task: str = ""
    action: str = ""
    service: str = ""
    num_rows: int = 0
    nbytes: int = 0
    rows: list[Whole] = []
    keys: dict[str, Whole] = {}
    lease: Whole = 0
    waited_ns: Nanoseconds = 0
    error: str = ""
    version: str = ""
    is_async: bool = False


TraceLine: TypeAlias = TraceHeader | TraceThread | TraceLoss | TraceSpan

_encoder = msgspec.json.Encoder()
decode_line = msgspec.json.Decoder(TraceLine).decode


def encoded(lines: list[TraceLine]) -> tuple[bytes, int]:
    """The lines as bytes, and how many were left out, because they hold text that is none in UTF-8."""
    try:
        return _encoder.encode_lines(lines), 0
    except (UnicodeEncodeError, OverflowError):
        if len(lines) == 1:
            return b"", 1
        parts = [encoded([line]) for line in lines]
        return b"".join(part for part, _ in parts), sum(lost for _, lost in parts)
