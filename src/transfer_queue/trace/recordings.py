"""The files of a folder: anybody may have written them, and a process that was killed left half a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from transfer_queue.errors import InvalidInput
from transfer_queue.trace.lines import FORMAT, SUFFIX, TraceHeader, TraceLoss, TraceSpan, TraceThread, decode_line
from transfer_queue.trace.switch import folder_of

MAX_LINE = 1 << 20  # bytes; ours have some thousands
MAX_RUNS = 1 << 10
MAX_RUN = 1 << 32


class TracedProcess(NamedTuple):
    """What one process recorded. `threads`: their names, as far as they are known."""

    header: TraceHeader
    spans: list[TraceSpan]
    threads: dict[int, str]
    lost: list[int]


def read_folder(path: str) -> tuple[list[TracedProcess], list[str]]:
    """The processes of a trace that was recorded to `path`, and remarks about what could not be read.

    Raises `InvalidInput` where there is nothing to read, OSError.
    """
    folder = next((Path(one) for one in (path, folder_of(path), f"{path}.d") if Path(one).is_dir()), None)
    if folder is None:
        remedy = f"TQ_TRACE={path} in the environment of a job makes one"
        raise InvalidInput(f"{path} is no folder of a trace, and there is no {path}.d: {remedy}")
    found: dict[str, TracedProcess] = {}
    remarks: list[str] = []
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        if file.is_file():
            with file.open("rb") as opened:
                remarks += [f"{file.name}: {text}" for text in _read(opened, found)]
    if not found:
        raise InvalidInput(f"{folder} has no trace that could be read{''.join(f'; {one}' for one in remarks[:8])}")
    return list(found.values()), remarks


def _read(file: BinaryIO, found: dict[str, TracedProcess]) -> Iterator[str]:
    """Add what is in a file. Yields remarks."""
    header = _decoded(file.readline(MAX_LINE))
    if not isinstance(header, TraceHeader):
        yield "not a file of a trace, or its first line is damaged: skipped"
        return
    if header.format != FORMAT:
        yield f"format {header.format}, this release reads {FORMAT}: skipped"
        return
    process = found.setdefault(header.ident, TracedProcess(header, [], {}, []))
    damaged = 0
    while line := file.readline(MAX_LINE):
        if not line.endswith(b"\n") and len(line) < MAX_LINE:
            yield "the last line is torn, as a kill leaves it: skipped"
            break
        damaged += not _take(process, _decoded(line))
    if damaged:
        yield f"{damaged} damaged lines: skipped"


def _decoded(line: bytes) -> object:
    try:
        return decode_line(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _take(process: TracedProcess, line: object) -> bool:
    """Whether the line is one."""
    match line:
        case TraceSpan() if _is_possible(line.rows):
            process.spans.append(line)
        case TraceThread():
            process.threads[line.thread] = line.name
        case TraceLoss():
            process.lost.append(line.spans)
        case _:
            return False
    return True


def _is_possible(runs: list[int]) -> bool:
    return not len(runs) % 2 and len(runs) <= MAX_RUNS and all(0 < number < MAX_RUN for number in runs[1::2])
