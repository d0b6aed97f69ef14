"""The same rows for every process of a data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.errors import InvalidSampling, MissingParameter
from transfer_queue.sampler.base import (
    BaseSampler,
    Dealt,
    Sampled,
    as_list,
    check_hashable,
    divided,
    whole_number,
)


class RankAwareSampler(BaseSampler):
    """The first `batch_size` ready rows to whoever first asks for a `dp_rank` and `batch_index`, the same to others.

    A batch is remembered until one of its rows is cleared, as `_states[partition][task][dp_rank][batch_index]`.
    """

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int | None = None,
        batch_index: Any = None,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Sampled:
        """See `BaseSampler.sample`; what is sampled is consumed. Nothing when fewer than `batch_size` rows are ready.

        Raises:
            MissingParameter: `dp_rank` or `batch_index` is not given. An InvalidSampling and a TypeError.
            InvalidSampling: `dp_rank` or `batch_size` is negative or not an int, or `batch_index` is not hashable.
        """
        _check(dp_rank, batch_index)
        size = whole_number(batch_size, "batch_size")
        if size < 0:
            raise InvalidSampling(f"batch_size {batch_size} is negative")
        known = self._states.get(partition_id, {}).get(task_name, {}).get(dp_rank, {}).get(batch_index)
        if known is not None:
            return list(known), list(known)
        if not 0 < size <= len(ready_indexes):
            return [], []
        sampled = as_list(ready_indexes[:size])
        ranks = self._states.setdefault(partition_id, {}).setdefault(task_name, {})
        ranks.setdefault(dp_rank, {})[batch_index] = list(sampled)
        return sampled, list(sampled)

    def deal(self, ready_indexes: list[int], batch_size: int, ranks: Sequence[int], **kwargs: Any) -> Dealt:
        """See `BaseSampler.deal`. Nothing is remembered here: the controller remembers what it dealt."""
        if type(self).sample is not RankAwareSampler.sample:
            return super().deal(ready_indexes, batch_size, ranks, **kwargs)
        rows = as_list(ready_indexes[:batch_size]) if len(ready_indexes) >= batch_size else []
        return divided(rows, len(ranks)), rows

    def needs(self, batch_size: int) -> int | None:
        """`batch_size`, except for subclasses that sample in another way."""
        return batch_size if type(self).sample is RankAwareSampler.sample and batch_size >= 0 else None

    def check_request(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """MissingParameter or InvalidSampling for what `sample` refuses, and as `BaseSampler`."""
        super().check_request(batch_size, sampling_config)
        if type(self).sample is RankAwareSampler.sample:
            _check(sampling_config.get("dp_rank"), sampling_config.get("batch_index"))


def _check(dp_rank: object, batch_index: object) -> None:
    if dp_rank is None or batch_index is None:
        raise MissingParameter("RankAwareSampler needs dp_rank and batch_index in sampling_config")
    check_hashable(batch_index=batch_index)
    if whole_number(dp_rank, "dp_rank") < 0:
        raise InvalidSampling(f"dp_rank {dp_rank} must be greater than or equal to 0")
