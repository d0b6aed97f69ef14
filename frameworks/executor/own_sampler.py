"""A sampler as programs write them, which both packages run in their controller."""

from __future__ import annotations

from typing import Any

from transfer_queue import BaseSampler


class LongestFirst(BaseSampler):
    """Hands out the rows with the greatest tag `total_lengths`, and uses up only every second one of them."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.least = least

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        tags = kwargs["partition"].get_custom_meta(list(ready_indexes))
        lengths = {index: tags.get(index, {}).get("total_lengths", 1) for index in ready_indexes}
        if kwargs.get("dp_rank") == 5:
            raise ValueError("no such rank")
        order = sorted(
            (index for index in ready_indexes if lengths[index] >= self.least), key=lambda i: (-lengths[i], i)
        )
        if len(order) < batch_size:
            return [], []
        return order[:batch_size], order[:batch_size:2]
