"""The storage unit: blocks, pins, the byte budget and waiting, and memory that is really returned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from units import BUDGET, LARGE, Shell

from transfer_queue.errors import InvalidInput, RowCleared, StoreFull
from transfer_queue.memory.bytes import PAGE
from transfer_queue.storage.extents import Extents
from transfer_queue.storage.shm import SMALL_NBYTES
from transfer_queue.wire.messages import REMOTE, UNIT_SHIFT, Allocated, Failed, InArena, Piece

LARGE_ROUNDED = SMALL_NBYTES + PAGE


@pytest.fixture
def shell() -> Iterator[Shell]:
    shell = Shell()
    yield shell
    shell.unit.check_invariants()
    shell.unit.close()


# ---- extents ----


def test_the_best_fitting_hole_is_taken_first() -> None:
    extents = Extents(1000, 10)
    starts = [extents.take(size) for size in (100, 50, 200, 50)]
    assert starts == [0, 100, 150, 350]
    extents.give(150, 200)
    extents.give(100, 50)
    assert extents.take(250) == 100
    assert extents.take(601) is None
    assert extents.take(600) == 400


def test_neighbours_that_are_free_become_one_range() -> None:
    extents = Extents(100, 10)
    for _ in range(10):
        extents.take(10)
    for start in (20, 40, 30, 10, 0, 90, 50, 70, 60, 80):
        extents.give(start, 10)
    assert extents.free() == [(0, 100)]


# ---- blocks ----


def test_blocks_do_not_share_bytes(shell: Shell) -> None:
    numbers = [shell.published(size, n + 1) for n, size in enumerate((1, 64, 65, LARGE, 3 * LARGE))]
    for n, number in enumerate(numbers):
        assert bool((shell.bytes_of(number) == n + 1).all())


def test_large_blocks_begin_at_a_page_and_small_ones_share_pages(shell: Shell) -> None:
    large = [shell.unit.block(shell.published(LARGE)) for _ in range(2)]
    small = [shell.unit.block(shell.published(10)) for _ in range(2)]
    assert all(block is not None and block.offset % PAGE == 0 for block in large)
    assert small[0] is not None
    assert small[1] is not None
    assert small[1].offset - small[0].offset == 64
    assert shell.unit.used_nbytes == 2 * LARGE_ROUNDED + 2 * 64


def test_a_dropped_block_gives_its_place_to_the_next_of_its_size(shell: Shell) -> None:
    number = shell.published(LARGE)
    place = shell.unit.block(number)
    shell.published(LARGE)
    shell.unit.drop(number)
    again = shell.unit.block(shell.published(LARGE))
    assert place is not None
    assert again is not None
    assert again.offset == place.offset
    assert shell.unit.block(number) is None


def test_only_the_session_that_allocated_may_fill_and_only_until_publication(shell: Shell) -> None:
    number = shell.allocate(10, b"mine")
    assert number is not None
    for session, block in ((b"other", number), (b"mine", 999)):
        with pytest.raises(InvalidInput, match="not one this client is filling"):
            shell.unit.unpublished(block, session)
    shell.unit.publish(number, b"")
    with pytest.raises(InvalidInput):
        shell.unit.unpublished(number, b"mine")


def test_describing_blocks_names_their_places_and_shares_layouts(shell: Shell) -> None:
    numbers = [shell.published(100), shell.published(200)]
    pieces = [Piece(number) for number in numbers]
    layouts: list[bytes] = []
    assert shell.unit.describe(pieces, layouts) == pieces
    assert layouts == [b"layout"]
    assert [(piece.nbytes, isinstance(piece.location, InArena)) for piece in pieces] == [(100, True), (200, True)]
    with pytest.raises(RowCleared):
        shell.unit.describe([Piece(999)], layouts)


def test_blocks_of_other_units_are_left_to_them(shell: Shell) -> None:
    here = shell.published(100)
    pieces = [Piece(1 << UNIT_SHIFT | 7), Piece(here)]
    assert shell.unit.describe(pieces, []) == pieces[1:]
    assert pieces[0].location == REMOTE


def test_a_renumbered_unit_numbers_its_blocks_anew_and_never_repeats_one(shell: Shell) -> None:
    first = shell.published(100)
    shell.unit.renumber(3)
    second = shell.published(100)
    shell.unit.renumber(3)
    third = shell.published(100)
    assert [number >> UNIT_SHIFT for number in (first, second, third)] == [0, 3, 3]
    assert len({first, second, third}) == 3
    assert shell.unit.published() == [first, second, third]


# ---- pins ----


def test_a_pinned_block_outlives_its_rows(shell: Shell) -> None:
    number = shell.published(LARGE, 7)
    for session in (b"a", b"a", b"b"):
        shell.unit.pin(number, session)
    shell.unit.drop(number)
    shell.published(LARGE, 9)
    assert bool((shell.bytes_of(number) == 7).all())
    assert shell.unit.pinned_nbytes() == {b"a".hex(): LARGE, b"b".hex(): LARGE}
    shell.unit.unpin(number, b"a")
    shell.unit.forget(b"b")
    assert shell.unit.block(number) is not None
    shell.unit.unpin(number, b"a")
    assert shell.unit.block(number) is None
    assert shell.unit.used_nbytes == LARGE_ROUNDED


def test_unpinning_what_is_not_pinned_does_nothing(shell: Shell) -> None:
    number = shell.published(10)
    shell.unit.pin(number, b"a")
    for block, session in ((number, b"b"), (999, b"a"), (-1, b"a")):
        shell.unit.unpin(block, session)
    assert shell.unit.pinned(number, b"a").pins == 1
    with pytest.raises(RowCleared, match="not pinned"):
        shell.unit.pinned(number, b"b")


def test_a_block_allocated_with_a_pin_stays_after_its_rows(shell: Shell) -> None:
    number = shell.allocate(10, pin=True)
    assert number is not None
    shell.unit.publish(number, b"")
    shell.unit.drop(number)
    assert shell.unit.block(number) is not None
    shell.unit.unpin(number, b"s", rid=1)
    assert shell.unit.used_nbytes == 0


def test_a_forked_session_holds_its_parents_pins_too(shell: Shell) -> None:
    number = shell.published(10)
    shell.unit.pin(number, b"parent")
    shell.unit.adopt(b"child", b"parent")
    shell.unit.forget(b"parent")
    shell.unit.drop(number)
    assert shell.unit.pinned(number, b"child").number == number
    shell.unit.forget(b"child")
    assert shell.unit.used_nbytes == 0


# ---- vanished clients ----


def test_a_vanished_client_leaves_no_unfinished_block_and_no_pin(shell: Shell) -> None:
    done, pinned = shell.published(100, session=b"gone"), shell.published(100)
    shell.unit.pin(pinned, b"gone")
    shell.allocate(LARGE, b"gone")
    shell.allocate(10, b"gone", pin=True)
    shell.unit.forget(b"gone")
    shell.unit.check_invariants()
    assert shell.unit.used_nbytes == 256
    assert shell.unit.block(done) is not None
    assert shell.unit.pinned_nbytes() == {}


# ---- budget ----


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_block_of_no_bytes_is_refused(shell: Shell, nbytes: int) -> None:
    with pytest.raises(InvalidInput):
        shell.allocate(nbytes)


def test_what_never_fits_is_refused_at_once(shell: Shell) -> None:
    with pytest.raises(StoreFull, match="budget"):
        shell.allocate(BUDGET + 1, wait_s=9, ticket="w")
    assert shell.unit.next_deadline() is None


def test_what_does_not_fit_now_waits_or_is_refused(shell: Shell) -> None:
    first = shell.published(BUDGET // 2 + 1)
    with pytest.raises(StoreFull, match="in use"):
        shell.allocate(BUDGET // 2)
    assert shell.allocate(BUDGET // 2, ticket="w", wait_s=9) is None
    shell.unit.drop(first)
    shell.unit.retry()
    assert shell.answers() == [("w", Allocated)]


def test_waiting_allocations_are_served_in_order_of_arrival(shell: Shell) -> None:
    first = shell.published(BUDGET - LARGE)
    shell.allocate(BUDGET // 2, ticket="large", wait_s=9)
    assert shell.allocate(1, ticket="small", wait_s=9) is None
    shell.unit.retry()
    assert shell.answers() == []
    shell.unit.drop(first)
    shell.unit.retry()
    assert shell.answers() == [("large", Allocated), ("small", Allocated)]


def test_a_deadline_is_store_full_and_lets_those_behind_pass(shell: Shell) -> None:
    shell.published(BUDGET // 2 + 1)
    shell.allocate(BUDGET // 2, ticket="large", wait_s=3)
    shell.allocate(1, ticket="small", wait_s=9)
    assert shell.unit.next_deadline() == 3
    shell.unit.expire(3)
    assert shell.answers() == [("large", Failed), ("small", Allocated)]
    assert shell.unit.next_deadline() is None


def test_a_forgotten_waiter_gets_nothing_and_lets_those_behind_pass(shell: Shell) -> None:
    shell.published(BUDGET // 2 + 1)
    shell.allocate(BUDGET // 2, ticket="gone", wait_s=3)
    shell.allocate(1, ticket="small", wait_s=9)
    shell.unit.forget_tickets({"gone"})
    assert shell.answers() == [("small", Allocated)]


def test_pinned_bytes_count_in_the_budget(shell: Shell) -> None:
    number = shell.published(BUDGET // 2 + 1)
    shell.unit.pin(number, b"reader")
    shell.unit.drop(number)
    with pytest.raises(StoreFull):
        shell.allocate(BUDGET // 2)
    shell.unit.unpin(number, b"reader")
    assert shell.allocate(BUDGET // 2) is not None


# ---- memory ----


def test_memory_that_was_touched_is_within_the_budget_whatever_the_sizes_of_blocks() -> None:
    budget = 32 << 20
    shell = Shell(budget)
    live: list[tuple[int, int]] = []
    size, most = 100 << 10, 0
    while size < budget // 4:
        while shell.unit.used_nbytes + size + PAGE <= budget:
            live.append((shell.published(size, 1), size))
            most = max(most, shell.unit.shm.resident_nbytes())
        for number, _ in [one for place, one in enumerate(live) if place % 3]:
            shell.unit.drop(number)
        live, size = live[::3], int(size * 2.4)
    assert budget * 0.9 < most <= budget
    shell.unit.close()


def test_memory_that_cannot_be_given_back_is_looked_at_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 8 << 20
    shell = Shell(budget)
    blocks = [shell.published(3000, 1) for _ in range(2 * (budget // 3072) // 3)]
    for number in blocks[::2]:
        shell.unit.drop(number)
    looks: list[int] = []
    resident = shell.unit.shm.resident_nbytes
    monkeypatch.setattr(shell.unit.shm, "resident_nbytes", lambda: looks.append(0) or resident())
    for _ in range(15):
        shell.published(200_000, 1)
    assert len(looks) <= 12, "twice each time that a sixteenth of the budget was placed"
    shell.unit.close()


@pytest.mark.parametrize("where", ["memory", "directory"])
def test_trimming_returns_free_memory_to_the_system(where: str, tmp_path: Path) -> None:
    shell = Shell(64 << 20, str(tmp_path) if where == "directory" else None)
    kept = shell.published(4 << 20, 3)
    for number in [shell.published(8 << 20, 1) for _ in range(3)]:
        shell.unit.drop(number)
    assert shell.unit.shm.resident_nbytes() >= 28 << 20
    shell.unit.trim(16 << 20)
    assert 4 << 20 <= shell.unit.shm.resident_nbytes() <= 16 << 20
    shell.unit.trim(0)
    assert shell.unit.shm.resident_nbytes() == 4 << 20
    assert bool((shell.bytes_of(kept) == 3).all())
    assert bool((shell.bytes_of(shell.published(8 << 20, 5)) == 5).all())
    assert list(tmp_path.iterdir()) == []
    shell.unit.check_invariants()
    shell.unit.close()


def test_an_untouched_arena_costs_no_memory(shell: Shell) -> None:
    shell.allocate(BUDGET)
    assert shell.unit.shm.resident_nbytes() == 0
    assert shell.unit.shm.arenas[0].size > 1 << 30
