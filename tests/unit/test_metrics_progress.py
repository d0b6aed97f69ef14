"""`tq_partition_production_progress`: how far a partition is for a task."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tables import Box

from transfer_queue.server.metrics.collector import ServerCollector
from transfer_queue.server.metrics.counters import MeteredService
from transfer_queue.storage.blocks import Unit
from transfer_queue.wire import messages as m


class Watched(Box):
    """A controller that is scraped."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.collector = ServerCollector(MeteredService(self.controller, unit), None)  # type: ignore[arg-type]

    def set_size(self, size: int) -> None:
        self.handle(m.SetPartition(1, "p", size, {}))

    def progress(self) -> dict[str, float]:
        """By task, of the only partition."""
        families = list(self.collector._partitions(self.controller))
        (family,) = [one for one in families if one.name == "tq_partition_production_progress"]
        assert all(sample.labels["partition_id"] == "p" for sample in family.samples)
        return {sample.labels["task_name"]: sample.value for sample in family.samples}


@pytest.fixture
def box() -> Iterator[Watched]:
    unit = Unit(1 << 20)
    yield Watched(unit)
    unit.close()


def test_progress_counts_the_fields_that_a_task_asks_for(box: Watched) -> None:
    box.put(8, ["tokens"])
    box.put([0, 1], ["reward"])
    box.fetch(1, ["tokens"], "scorer")
    box.fetch(1, ["tokens", "reward"], "actor")
    box.fetch(1, ["tokens", "values"], "critic", empty=True)
    assert box.progress() == {"all": 1.0, "scorer": 1.0, "actor": 0.25, "critic": 0.0}
    box.put([2, 3, 4, 5], ["reward"])
    assert box.progress()["actor"] == 0.75


def test_a_task_that_asks_in_several_ways_needs_all_of_the_fields(box: Watched) -> None:
    box.put(4, ["x"])
    box.put([0], ["y"])
    box.fetch(1, ["x"])
    box.fetch(1, ["y"], empty=True)
    assert box.progress()["t"] == 0.25


def test_progress_is_of_the_declared_size(box: Watched) -> None:
    box.set_size(16)
    box.fetch(1, ["x"], empty=True)
    assert box.progress() == {"all": 0.0, "t": 0.0}
    box.put(4, ["x"])
    assert box.progress() == {"all": 0.25, "t": 0.25}
    box.put(16, ["x"])
    assert box.progress() == {"all": 1.0, "t": 1.0}


def test_a_task_that_never_asked_for_rows_has_the_progress_of_all(box: Watched) -> None:
    box.put(2, ["x"])
    box.insert(2)
    assert box.consumed("watcher") == dict.fromkeys(range(4), 0)
    assert box.progress() == {"all": 0.5, "watcher": 0.5}


def test_cleared_rows_do_not_count(box: Watched) -> None:
    box.put(4, ["x"])
    box.fetch(1, ["x"])
    box.clear([0, 1])
    box.insert(2)
    assert box.progress() == {"all": 0.5, "t": 0.5}
