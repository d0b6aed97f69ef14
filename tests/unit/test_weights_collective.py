"""What a broadcast over NCCL is told, with torch's group for it in its place: that takes several GPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transfer_queue.errors import DeadlineExceeded
from transfer_queue.weights.transport import collective
from transfer_queue.weights.transport.collective import BLOCKING_WAIT, CollectiveInfo, Group
from transfer_queue.weights.transport.deadline import Deadline

LATE = "Watchdog caught collective operation timeout: it ran for 9 milliseconds before timing out."


class Work:
    def __init__(self, given: timedelta, is_late: bool) -> None:
        self.given, self._is_late = given, is_late
        self.waited: timedelta | None = None

    def wait(self, timeout: timedelta) -> None:
        self.waited = timeout
        if self._is_late:
            raise RuntimeError(LATE)


class Nccl:
    """Of torch's `ProcessGroupNCCL`, what a group of ours calls."""

    Options = SimpleNamespace
    is_late = False

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.blocking_wait = os.environ.get(BLOCKING_WAIT)
        self.works: list[Work] = []

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        assert (len(tensors), options.rootRank) == (1, 0)
        self.works.append(Work(options.timeout, self.is_late))
        return self.works[-1]

    def abort(self) -> None:
        """Nothing runs."""


def made(monkeypatch: pytest.MonkeyPatch, is_late: bool = False) -> Group:
    kind = type("Made", (Nccl,), {"is_late": is_late})
    monkeypatch.setattr(collective.dist, "ProcessGroupNCCL", kind, raising=False)
    info = CollectiveInfo(host="127.0.0.1", port=1, round=1, world_size=2, backend="nccl")
    return Group(info, torch.device("cpu"), 0, collective.dist.HashStore(), Deadline(30))


@pytest.mark.parametrize("before", [None, "0"])
def test_a_group_has_no_watchdog_that_could_end_the_process_and_others_are_made_as_before(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    if before is not None:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    assert made(monkeypatch)._group.blocking_wait == "1"
    assert os.environ.get(BLOCKING_WAIT) == before


def test_a_broadcast_has_until_its_deadline_however_late_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    group, deadline = made(monkeypatch), Deadline(30)
    for _ in range(2):
        group.begin(torch.zeros(1), deadline)
    for work in group._group.works:
        group.end(deadline)
        assert abs(work.waited - work.given) < timedelta(milliseconds=1)  # NCCL's works count from their begin


def test_a_broadcast_that_is_late_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeadlineExceeded, match="before timing out"):
        made(monkeypatch, is_late=True).broadcast(torch.zeros(1), Deadline(30))
