"""Rows in the order of their indexes."""

from __future__ import annotations

from typing import Any

from transfer_queue.sampler.base import BaseSampler, Sampled, as_list, whole_number


class SequentialSampler(BaseSampler):
    """The first `batch_size` ready rows, or all when there are fewer; a negative size drops that many from the end."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        """See `BaseSampler.sample`; what is sampled is consumed."""
        sampled = as_list(ready_indexes[: whole_number(batch_size, "batch_size")])
        return sampled, list(sampled)

    def needs(self, batch_size: int) -> int | None:
        """`batch_size`, except for a negative one and for subclasses that sample in another way."""
        own = type(self).sample is SequentialSampler.sample
        return batch_size if own and batch_size >= 0 else None
