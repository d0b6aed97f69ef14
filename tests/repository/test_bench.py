"""The benchmark measures everybody alike, says of how many numbers a figure is the median, and notices wrong bytes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from bench import bridge, digest, reads, report, singles
from bench.ops import bulk, calls
from bench.read_systems import by_hand
from bench.result import Samples
from bench.session import Session


class Slow:
    """A system whose first get takes longer than a turn may."""

    def __init__(self) -> None:
        self.gets = 0

    def locate(self, partition: str) -> None: ...

    def leave(self, partition: str) -> None: ...

    def get(self, partition: str, keys: list[str], positions: list[int] | None, copy: bool) -> Any:
        self.gets += positions is None
        return {}

    def sums(self, result: Any) -> digest.Digest:
        return {}


def test_nobody_is_measured_by_a_cold_get_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "TURN_S", 0.0)
    session, spec = Session("plain"), {"rows": 1}
    session._system = slow = Slow()  # type: ignore[assignment]
    session.expected[bulk.spec_name(spec)] = {}
    found = bulk.get(session, spec, "p", times=6, pause_s=0)
    assert slow.gets == 2
    assert len(found["each_s"]) == 1
    assert bulk.get(session, spec, "p")["each_s"]
    assert slow.gets == 3


def test_lists_become_the_tensors_that_torch_makes_of_them() -> None:
    lists: dict[str, list[Any]] = {"tokens": [[1, 2], [3]], "log_probs": [[0.5], [1.0, 2.0]], "reward": [1.0, 0.0]}
    found = bulk.tensors_of(lists, 2)
    for name, column in lists.items():
        for got, row in zip(found[name].unbind(), column, strict=True):
            assert torch.equal(got, torch.tensor(row))
            assert got.dtype == torch.tensor(row).dtype


def test_a_figure_says_of_how_many_numbers_it_is_the_median() -> None:
    samples = Samples()
    samples.add("ours", {"put": [1.0, 2.0, 3.0]})
    assert report.sampled(samples.row(1, "put", "put")) == "3"
    samples.add("tq", {"put": 1.0})
    assert report.sampled(samples.row(1, "put", "put")) == "ours 3, tq 1"
    assert "ours 3, tq 1" in report.table([samples.row(1, "put", "put")])


def test_a_read_with_rows_in_each_others_place_is_found() -> None:
    found = by_hand("strings")()
    reads.verify(found, "strings")
    swapped = found[[1, 0, *range(2, len(found))]]
    with pytest.raises(digest.WrongBytes, match="2 rows differ"):
        reads.verify(swapped, "strings")


def test_a_row_that_is_not_as_it_was_put_is_found() -> None:
    case = singles.CASES["take-1"]
    row = np.full(case.row_nbytes // 8, 7.0)
    row[0] = time.monotonic()
    singles.verify(row, case)
    row[5] = 8.0
    with pytest.raises(AssertionError, match="parts of several rows"):
        singles.verify(row, case)


@pytest.mark.parametrize("write", [True, False])
def test_rows_of_coroutines_are_looked_at(write: bool) -> None:
    class Wrong:
        """Gives another row than was put."""

        async def async_kv_put(self, *given: Any) -> None: ...

        async def async_kv_batch_get(self, *given: Any) -> Any:
            return self.kv_batch_get()

        def kv_batch_get(self, *given: Any) -> Any:
            return {name: value[None] for name, value in calls.row_fields(1).items()}

    session = Session("plain")
    session._system = type("System", (), {"tq": Wrong()})()
    with pytest.raises(digest.WrongBytes, match="of row 4"):
        calls.async_rows(session, "p", 5, 2, write)


def test_what_rows_share_is_one_array_for_ray() -> None:
    image = {"pixel_values": torch.ones(2), "image_grid_thw": torch.ones(1)}
    found = bridge.as_arrays({bridge.IMAGES: [image, image]}, lists=False)[bridge.IMAGES]
    assert found[0] is found[1]
    assert isinstance(found[0]["pixel_values"], np.ndarray)
