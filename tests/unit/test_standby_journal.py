"""The journal that a server shares with its standby."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest
from standby_sim import recorded

from transfer_queue.controller import Controller
from transfer_queue.errors import ProtocolError
from transfer_queue.sampler import SequentialSampler
from transfer_queue.schema import FieldSchema
from transfer_queue.server.standby import records as r
from transfer_queue.server.standby.journal import Journal, JournalUseless, Succession
from transfer_queue.server.standby.keeper import StandbyKeeper
from transfer_queue.server.standby.recording import Recorder, RecordingController, RecordingRegistry, RecordingUnit
from transfer_queue.wire import messages as m


def test_what_is_not_settled_did_not_happen() -> None:
    recorder, journal = Recorder(), Journal()
    recorder.begin(journal)
    recorder.note(r.Dropped(1))
    recorder.settle()
    recorder.note(r.Dropped(2))
    assert list(journal.records()) == [r.Dropped(1)]
    recorder.note(r.Dropped(3))
    recorder.settle()
    assert list(journal.records()) == [r.Dropped(1), r.Dropped(2), r.Dropped(3)]
    journal.close()


def test_what_was_noted_before_a_journal_began_is_not_in_it() -> None:
    recorder, journal = Recorder(), Journal()
    recorder.note(r.Dropped(1))
    recorder.begin(journal)
    recorder.note(r.Dropped(2))
    recorder.settle()
    assert list(journal.records()) == [r.Dropped(2)]
    journal.close()


def test_a_child_reads_what_its_parent_settles_later() -> None:
    journal, (ours, theirs), (told, tell) = Journal(), os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.read(ours, 1)
        os.write(tell, repr(list(journal.records())).encode())
        os._exit(0)
    journal.write([r.Placed(0, 64, 10, b"owner")])
    os.write(theirs, b"!")
    assert os.read(told, 1000).decode() == repr([r.Placed(0, 64, 10, b"owner")])
    os.waitpid(child, 0)
    for descriptor in (ours, theirs, told, tell):
        os.close(descriptor)
    journal.close()


def test_a_journal_that_something_was_left_out_of_is_refused() -> None:
    journal = Journal()
    journal.write([r.Tidied()])
    journal.leave()
    with pytest.raises(JournalUseless):
        list(journal.records())
    journal.close()


def test_a_journal_that_is_full_is_refused_rather_than_cut() -> None:
    journal = Journal(size=4096)
    for number in range(300):
        journal.write([r.Published(number, b"layout", 0)])
    assert journal.is_useless
    journal.close()


def test_one_standby_is_appointed_at_a_time() -> None:
    succession = Succession()
    assert succession.current == 0
    succession.appoint(1)
    succession.appoint(2)
    assert succession.current == 2


def _refused_by_the_unit(recorder: Recorder) -> None:
    RecordingUnit(1 << 20, None, recorder).drop(7)


def _refused_by_the_registry(recorder: Recorder) -> None:
    RecordingRegistry(recorder).join(m.Join(1, b"one", "host:1", b"odd"), "host:1", None)  # type: ignore[arg-type]


def _refused_by_the_controller(recorder: Recorder) -> None:
    controller = RecordingController(SequentialSampler(), reserved_rows=0)
    controller.record_to(recorder)
    field = FieldSchema("x", "dense", "int64", ())
    put = m.Commit(1, "p", 1, None, None, [field], 9, b"layout", None, 0.0)
    Controller.handle(controller, put, "ticket", b"s", 0.0)
    controller.relocate(9, 9, np.empty(0, np.int64))


@pytest.mark.parametrize("ask", [_refused_by_the_unit, _refused_by_the_registry, _refused_by_the_controller])
def test_what_was_refused_is_not_in_it(ask: Callable[[Recorder], Any]) -> None:
    """The standby could not carry it out either, and would be of no use."""
    recorder, journal = Recorder(), Journal(size=1 << 20)
    recorder.begin(journal)
    with pytest.raises((KeyError, ProtocolError)):
        ask(recorder)
    recorder.settle()
    assert list(journal.records()) == []
    recorder.begin(None)


def test_a_standby_whose_end_cannot_be_heard_of_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[int] = []

    def fails(pid: int) -> int:
        forked.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def take_over() -> NoReturn:
        os._exit(1)

    recorder = Recorder()
    service = recorded(SequentialSampler(), recorder)
    monkeypatch.setattr(os, "pidfd_open", fails)
    with pytest.raises(OSError, match="Too many open files"):
        StandbyKeeper(service, recorder, lambda: (), take_over)._fork(Journal())
    (pid,) = forked
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    service.unit.close()
