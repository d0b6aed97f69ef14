"""Commits that wait for the controller's answer, and what becomes of their blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from units import Shell

from transfer_queue.errors import InvalidInput
from transfer_queue.server.pending_commits import PendingCommits
from transfer_queue.storage.blocks import Block

ASKED, TICKET = (b"s", 7), ("link", 7)


@pytest.fixture
def shell() -> Iterator[Shell]:
    shell = Shell()
    yield shell
    shell.unit.close()


@pytest.fixture
def pending(shell: Shell) -> PendingCommits:
    """A commit of one block waits."""
    number = shell.allocate(100)
    assert number is not None
    pending = PendingCommits(shell.unit)
    pending.hold(TICKET, ASKED, [(block_of(shell, number), b"layout")])
    return pending


def block_of(shell: Shell, number: int) -> Block:
    block = shell.unit.block(number)
    assert block is not None
    return block


def number_of(pending: PendingCommits) -> int:
    (number,) = pending.blocks()
    return number


def test_its_client_cannot_change_it_and_readers_know_its_layout(shell: Shell, pending: PendingCommits) -> None:
    number = number_of(pending)
    with pytest.raises(InvalidInput):
        shell.unit.unpublished(number, b"s")
    assert block_of(shell, number).layout == b"layout"


def test_what_was_or_may_have_been_carried_out_is_known_until_its_session_ends(
    shell: Shell, pending: PendingCommits
) -> None:
    number = number_of(pending)
    pending.answered(TICKET, committed=True)
    assert pending.done == {ASKED: number}
    doubtful, refused = shell.allocate(100), shell.allocate(100)
    assert doubtful is not None
    assert refused is not None
    for rid, block in ((8, doubtful), (9, refused)):
        pending.hold(("link", rid), (b"s", rid), [(block_of(shell, block), b"layout")])
    pending.leave_in_doubt(("link", 8))
    pending.answered(("link", 9), committed=False)
    assert pending.done == {ASKED: number, (b"s", 8): doubtful}
    pending.end_session(b"other")
    assert len(pending.done) == 2
    pending.end_session(b"s")
    assert not pending.done


def test_an_answer_publishes_it_or_drops_it(shell: Shell, pending: PendingCommits) -> None:
    number = number_of(pending)
    pending.answered(TICKET, committed=True)
    assert shell.unit.published() == [number]
    assert not pending.held
    other = shell.allocate(100)
    assert other is not None
    pending.hold(TICKET, ASKED, [(block_of(shell, other), b"layout")])
    pending.answered(TICKET, committed=False)
    assert shell.unit.block(other) is None


def test_an_answer_after_its_rows_were_cleared_harms_nobody(shell: Shell, pending: PendingCommits) -> None:
    shell.unit.drop(number_of(pending))
    pending.answered(TICKET, committed=True)
    assert shell.unit.published() == []
    shell.unit.forget(b"s")
    assert shell.unit.used_nbytes == 0


def test_a_withdrawn_one_is_its_client_s_again(shell: Shell, pending: PendingCommits) -> None:
    number = number_of(pending)
    pending.withdraw(TICKET)
    assert shell.unit.unpublished(number, b"s").number == number
    shell.unit.forget(b"s")
    assert shell.unit.used_nbytes == 0


def test_a_copy_is_not_published_before_it_is_taken(shell: Shell, pending: PendingCommits) -> None:
    number = shell.allocate(100, b"mover")
    assert number is not None
    copy = block_of(shell, number)
    copy.digest = 4711
    ticket = pending.hold_copy(copy, b"layout")
    pending.join_again()
    assert shell.unit.published() == []
    pending.answered(ticket, committed=True)
    assert shell.unit.published() == [number]
    assert copy.digest == 4711
    assert pending.in_doubt == [number], "its rows may have been cleared with nobody there to be told"
    assert not pending.done, "nobody asks for a copy again"


def test_a_copy_whose_process_was_killed_is_in_doubt(shell: Shell, pending: PendingCommits) -> None:
    number = shell.allocate(100, b"mover")
    assert number is not None
    pending.hold_copy(block_of(shell, number), b"layout")
    pending.lose_connections(were_passed_on=True)
    assert pending.in_doubt == [number]
    assert list(pending.held) == [ASKED]


def test_an_orphan_is_asked_again_with_the_block_it_had(shell: Shell, pending: PendingCommits) -> None:
    number = number_of(pending)
    pending.lose_connections(were_passed_on=True)
    assert not pending.holds(TICKET)
    assert [block.number for block in pending.resume(("other link", 7), ASKED)] == [number]
    assert pending.resume(("other link", 8), (b"s", 8)) == []
    pending.answered(("other link", 7), committed=True)
    assert shell.unit.published() == [number]


def test_an_orphan_whose_session_ends_is_in_doubt(shell: Shell, pending: PendingCommits) -> None:
    number = number_of(pending)
    pending.end_session(b"s")
    assert pending.in_doubt == [], "somebody waits for it"
    pending.lose_connections(were_passed_on=True)
    pending.end_session(b"s")
    shell.unit.forget(b"s")
    assert pending.in_doubt == [number]
    assert shell.unit.published() == [number]
