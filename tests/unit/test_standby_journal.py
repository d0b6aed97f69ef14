"""The journal that a server shares with its standby."""

from __future__ import annotations

import os

import pytest

from transfer_queue.server.standby import records as r
from transfer_queue.server.standby.journal import Journal, JournalUseless, Succession
from transfer_queue.server.standby.recording import Recorder


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
