"""Series of partitions: how far ahead a producer runs, and who clears what was used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tables import Box, reloaded

from transfer_queue.controller import Controller
from transfer_queue.controller.ledger import Ledger
from transfer_queue.controller.recovery import Recovery
from transfer_queue.controller.snapshot import exported
from transfer_queue.errors import DeadlineExceeded, InvalidInput, UnknownRows
from transfer_queue.sampler import SequentialSampler
from transfer_queue.wire import messages as m


def opened(
    box: Box, number: int, max_open: int = 0, wait_s: float = 60.0, consumers: Any = ("t",), **more: Any
) -> bool:
    """Whether it is open at once; else its producer waits under its number."""
    values = {"clears": True, "series": "train", "timeout_s": wait_s} | more
    message = m.OpenPartition(number, f"p{number}", max_open=max_open, consumers=list(consumers), **values)
    return box.handle(message, number) is not None


def finish(box: Box, number: int, consumer: str = "t") -> None:
    box.handle(m.FinishPartition(1, f"p{number}", consumer))


def told(box: Box) -> list[Any]:
    found = [ticket for ticket, reply in box.controller.outbox if isinstance(reply, m.Done)]
    box.controller.outbox.clear()
    return found


@pytest.mark.parametrize("max_open", [0, 1, 3])
def test_a_producer_is_at_most_so_many_partitions_ahead(max_open: int) -> None:
    box = Box()
    for number in range(max_open + 1):
        assert opened(box, number, max_open)
    for number in range(max_open + 1, 9):
        assert not opened(box, number, max_open)
        assert told(box) == []
        finish(box, number - max_open - 1)
        assert told(box) == [number]
    assert len(box.partitions()) == max_open + 1


def test_rows_that_came_after_the_declared_ones_were_used_keep_no_partition_of_a_series() -> None:
    box = Box()
    opened(box, 0)
    box.handle(m.SetPartition(1, "p0", 2, {}))
    box.put(["a", "b"], partition="p0"), box.fetch(2, partition="p0")
    box.put(["late"], partition="p0")
    assert not opened(box, 1)
    box.clear(["a", "b"], partition="p0"), box.clear(["late"], partition="p0")
    assert told(box) == [1]


def test_the_last_of_the_consumers_clears_a_partition() -> None:
    box = Box()
    opened(box, 0, consumers=["actor", "critic"])
    box.put(2, partition="p0")
    finish(box, 0, "actor")
    finish(box, 0, "actor")
    assert box.partitions() == ["p0"]
    finish(box, 0, "critic")
    assert box.partitions() == []
    assert box.freed()


def test_a_partition_that_does_not_clear_itself_holds_its_place_until_somebody_does() -> None:
    box = Box()
    opened(box, 0, clears=False)
    assert not opened(box, 1)
    finish(box, 0)
    assert told(box) == []
    box.clear(partition="p0")
    assert told(box) == [1]


def test_two_producers_may_wait_to_open_the_same_partition() -> None:
    box = Box()
    opened(box, 0)
    message = m.OpenPartition(1, "p1", "train", 0, ["t"], True, 60.0)
    assert [box.handle(message, asker) for asker in ("one", "two")] == [None, None]
    other = m.OpenPartition(2, "p1", "other", 0, ["t"], True, 60.0)
    box.handle(m.OpenPartition(3, "q", "other", 0, ["t"], True, 60.0))
    assert box.handle(other, "of another series") is None
    assert not opened(box, 4, max_open=2)
    finish(box, 0)
    answers = dict(box.controller.outbox)
    assert [type(answers[asker]) for asker in ("one", "two")] == [m.Done, m.Done]
    assert answers["of another series"].code == InvalidInput.code
    assert 4 in answers, "and whoever came behind them has a turn"
    assert not box.controller.series.parked


def test_producers_of_a_series_come_in_their_order_and_series_do_not_wait_for_each_other() -> None:
    box = Box()
    opened(box, 0)
    assert not opened(box, 1)
    assert not opened(box, 2, max_open=5), "it came later"
    assert opened(box, 3, series="other")
    finish(box, 0)
    assert told(box) == [1, 2]


def test_opening_twice_is_opening_once_and_in_another_way_is_refused() -> None:
    box = Box()
    assert opened(box, 0)
    assert opened(box, 0)
    with pytest.raises(InvalidInput, match="is open in series 'train'"):
        opened(box, 0, consumers=["other"])


def test_who_waits_in_vain_hears_for_whom() -> None:
    box = Box()
    opened(box, 0, consumers=["actor"])
    with pytest.raises(DeadlineExceeded, match=r"'p0' \(for actor\)"):
        opened(box, 1, wait_s=0.0)
    assert not opened(box, 1, wait_s=5.0)
    assert not opened(box, 2, max_open=1, wait_s=50.0)
    box.expire(5.0)
    assert [type(reply) for _, reply in box.controller.outbox] == [m.Failed, m.Done]
    report = box.handle(m.DescribeSeries(1, "train")).values
    assert list(report["open"]) == ["p0", "p2"]


def test_a_producer_that_is_gone_does_not_hold_up_others() -> None:
    box = Box()
    opened(box, 0)
    assert not opened(box, 1)
    assert not opened(box, 2, max_open=1)
    box.forget(1)
    assert told(box) == [2]


def test_a_partition_that_was_cleared_has_no_consumers() -> None:
    box = Box()
    opened(box, 0)
    with pytest.raises(InvalidInput, match=r"has consumers \['t'\]"):
        finish(box, 0, "u")
    finish(box, 0)
    with pytest.raises(UnknownRows):
        finish(box, 0)


@pytest.mark.parametrize(
    "bad",
    [{"max_open": -1}, {"consumers": ["t", "t"]}, {"consumers": []}, {"consumers": [""]}, {"series": ""}],
    ids=str,
)
def test_what_means_nothing_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        opened(Box(), 0, **bad)


def test_a_series_outlives_its_controller() -> None:
    box = Box()
    ledger = Ledger()
    box.controller = Controller(SequentialSampler(), None, 0, ledger=ledger)
    blank = exported(Controller(SequentialSampler(), None, 0, ledger=Ledger()).state)
    opened(box, 0, 1, consumers=["t", "u"])
    opened(box, 1, 1)
    assert not opened(box, 2, 1)
    finish(box, 1)
    finish(box, 0)
    heir = Box()
    heir.controller = Controller(SequentialSampler(), None, 0, ledger=Ledger())
    recovery = Recovery(heir.controller, *blank, 0)
    for fact in ledger.take():
        recovery.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(fact), type=type(fact)))
    recovery.finish()
    for later in (heir, reloaded(heir)):
        assert later.partitions() == ["p0", "p2"]
        assert not opened(later, 3, 1)
        finish(later, 0, "u")
        assert told(later) == [3]
