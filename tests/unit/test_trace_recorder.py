"""A process that records a trace on a disk that does not answer."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from conftest import until

from transfer_queue.trace import file as trace_file
from transfer_queue.trace import recorder as recorder_module
from transfer_queue.trace.file import TraceFile
from transfer_queue.trace.lines import TraceSpan
from transfer_queue.trace.recorder import SpanRecorder
from transfer_queue.trace.recordings import read_folder

WAITING = 100_000


class Large:
    """A span whose line has about 10 KB."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def span(self) -> TraceSpan:
        return TraceSpan(1, 1, self.thread, "put", "p" * 10_000)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the disk takes what is written."""
    event, write = threading.Event(), TraceFile._write

    def blocked(self: TraceFile, data: bytes) -> None:
        assert event.wait(60)
        write(self, data)

    monkeypatch.setattr(TraceFile, "_write", blocked)
    monkeypatch.setattr(trace_file, "WAITING_NBYTES", WAITING)
    monkeypatch.setattr(recorder_module, "FLUSH_S", 0.001)
    return event


def test_what_waits_for_a_disk_is_bounded_in_bytes_and_the_rest_is_counted(
    tmp_path: Path, answers: threading.Event
) -> None:
    recorder = SpanRecorder(str(tmp_path), "", 1 << 26, lambda failed: None)
    for _ in range(64):
        recorder.add(Large())
        until(lambda: not recorder._pending, "the lines of a span")
    assert recorder._file is not None
    assert 0 < recorder._file.waiting_nbytes <= WAITING
    answers.set()
    recorder.close()
    (found,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in found.read_text().splitlines()]
    written = sum(line[0] == "span" for line in lines)
    assert 0 < written < 64
    assert [line[1] for line in lines if line[0] == "lost"] == [64 - written]


def test_a_recorder_that_ends_writes_what_waits(tmp_path: Path) -> None:
    recorder = SpanRecorder(str(tmp_path), "", 1 << 26, lambda failed: None)
    for _ in range(200):
        recorder.add(Large())
    recorder.close()
    (found,) = tmp_path.glob("*.jsonl")
    assert found.read_text().count('["span"') == 200


def test_threads_that_had_one_number_one_after_the_other_are_all_named(tmp_path: Path) -> None:
    recorder = SpanRecorder(str(tmp_path), "", 1 << 26, lambda failed: None)
    span = Large()
    for name in [
        *(f"rollout-{number}" for number in range(3)),
        "rollout-2",
        *(f"later-{number}" for number in range(9)),
    ]:
        adding = threading.Thread(target=recorder.add, args=(span,), name=name)
        adding.start()
        adding.join()
    recorder.close()
    (process,), remarks = read_folder(str(tmp_path))
    first = "rollout-0, rollout-1, rollout-2, later-0, later-1, later-2, later-3, later-4"
    assert process.threads == {span.thread: f"{first}, ..."}
    assert (len(process.spans), remarks) == (13, [])
