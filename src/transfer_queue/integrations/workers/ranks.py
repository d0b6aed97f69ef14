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


class Ranks:
    """Those of this worker's `groups`, as vLLM and SGLang have them (`world_size`, `cpu_group`). Every worker has to
    make the same calls in the same order."""

    def __init__(self, groups: Callable[[], list[Any]]) -> None:
        self._groups = groups

    def same(self, number: int) -> bool:
        """Whether all gave this number."""
        lowest, highest = self._lowest([number, -number])
        return lowest == number == -highest

    def all(self, well: bool) -> bool:
        """Whether all are well. False also when somebody does not answer within `TIMEOUT_S`."""
        return self._lowest([int(well)])[0] == 1

    def _lowest(self, numbers: list[int]) -> list[int]:
        found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        try:
            for group in self._groups():
                if group.world_size == 1:
                    continue
                work = dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group.cpu_group, async_op=True)
                work.wait(timedelta(seconds=TIMEOUT_S))
        except RuntimeError as error:
            log.error("the other workers of this server do not answer: %s", error)
            return [-(2**62)] * len(numbers)
        return [int(one) for one in found]
