"""The workers that hold the parts of one model. They get the same calls, so each may ask what the others say."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed
log = logging.getLogger("transfer_queue.weights")
TIMEOUT_S = 30.0


_LOWEST = -(2**62)


class Ranks:
    """Those of this worker's `groups`, as vLLM and SGLang have them (`world_size`, `cpu_group`). Every worker has to
    make the same calls in the same order. What a worker says counts also when it has not waited for the others."""

    def __init__(self, groups: Callable[[], list[Any]]) -> None:
        self._groups = groups

    def same(self, number: int) -> bool:
        """Whether all gave this number. False also when somebody does not answer within `TIMEOUT_S`: then others may
        find that all did."""
        found = self._lowest([number, -number], TIMEOUT_S)
        return found is not None and found[0] == number == -found[1]

    def all(self, well: bool, timeout_s: float = 0.0) -> bool | None:
        """Whether all are well, at once when this one is not. None, it is not known, when somebody does not answer
        within `timeout_s`, and `TIMEOUT_S` at least: who comes later may find that all are."""
        found = self._lowest([int(well)], max(timeout_s, TIMEOUT_S) if well else None)
        if not well:
            return False
        return None if found is None else found[0] == 1

    def _lowest(self, numbers: list[int], timeout_s: float | None) -> list[int] | None:
        """None when somebody did not answer in time, which further groups are told, or this one has not waited."""
        is_known = timeout_s is not None
        for group in self._groups():
            if group.world_size == 1:
                continue
            mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            try:
                work = dist.all_reduce(mine, op=dist.ReduceOp.MIN, group=group.cpu_group, async_op=True)
                if timeout_s is not None:
                    work.wait(timedelta(seconds=timeout_s))
                    numbers = mine.tolist()
            except RuntimeError as error:
                log.error("the other workers of this server do not answer: %s", error)
                numbers, is_known = [_LOWEST] * len(numbers), False
        return numbers if is_known else None
