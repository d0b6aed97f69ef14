"""Whole groups: all answers to one prompt, or none of them."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from transfer_queue.errors import InvalidSampling
from transfer_queue.sampler.base import (
    BaseSampler,
    Dealt,
    PartitionView,
    Ready,
    Sampled,
    as_list,
    check_hashable,
    divided,
    positive,
    tags_of,
    whole_number,
)


class GRPOGroupNSampler(BaseSampler):
    """Hands out complete groups of `n_samples_per_prompt` rows.

    Rows whose tags have `group_tag` form groups by its value: n ready rows that share it are a group, taken in
    ascending order. Of the rows without it, n consecutive indexes are a group. Groups come in the order of their
    smallest index.
    `group_tag=None` ignores tags. A result is remembered, and repeated, when `dp_rank` is given.
    """

    def __init__(self, n_samples_per_prompt: int = 1, group_tag: str | None = "group_id") -> None:
        """Raises:
        InvalidSampling: `n_samples_per_prompt` is not a positive int, or `group_tag` is neither a str nor None.
        """
        super().__init__()
        self.n_samples_per_prompt = positive(n_samples_per_prompt, "n_samples_per_prompt")
        if group_tag is not None and not isinstance(group_tag, str):
            raise InvalidSampling(f"group_tag must be a str or None, got {group_tag!r}")
        self.group_tag = group_tag

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Sampled:
        """See `BaseSampler.sample`; what is sampled is consumed.

        Raises:
            InvalidSampling: `batch_size` is negative or not a multiple of `n_samples_per_prompt`, or a row's
                group cannot be hashed.
        """
        rank, batch = kwargs.get("dp_rank"), kwargs.get("batch_index")
        check_hashable(dp_rank=rank, batch_index=batch)
        known = self._states.get(partition_id, {}).get(task_name, {}).get(rank, {}).get(batch)
        if rank is not None and known is not None:
            return list(known[0]), list(known[1])
        groups = self._groups_in(batch_size)
        sampled = self._pick(ready_indexes, groups, kwargs.get("partition"))
        if sampled and rank is not None:
            ranks = self._states.setdefault(partition_id, {}).setdefault(task_name, {})
            ranks.setdefault(rank, {})[batch] = (list(sampled), list(sampled))
        return sampled, list(sampled)

    def deal(self, ready_indexes: list[int], batch_size: int, ranks: Sequence[int], **kwargs: Any) -> Dealt:
        """See `BaseSampler.deal`; every group goes to one rank."""
        shares, consumed = super().deal(ready_indexes, batch_size, ranks, **kwargs)
        if type(self).sample is GRPOGroupNSampler.sample:
            shares = self._by_group(shares)
        return shares, consumed

    def _by_group(self, shares: list[list[int]]) -> list[list[int]]:
        """The same rows, which are groups one after the other, divided so that each group is in one share."""
        return divided(list(itertools.chain.from_iterable(shares)), len(shares), self.n_samples_per_prompt)

    def check_request(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """InvalidSampling for a `batch_size` that `sample` refuses, and as `BaseSampler`."""
        super().check_request(batch_size, sampling_config)
        if type(self).sample is GRPOGroupNSampler.sample:
            self._groups_in(batch_size)

    def _groups_in(self, batch_size: int) -> int:
        groups, rest = divmod(whole_number(batch_size, "batch_size"), self.n_samples_per_prompt)
        if rest or groups < 0:
            raise InvalidSampling(
                f"batch_size {batch_size} must be a multiple of n_samples_per_prompt {self.n_samples_per_prompt}, "
                f"and not negative"
            )
        return groups

    def _pick(self, ready: Ready, groups: int, partition: PartitionView | None) -> list[int]:
        if not groups or len(ready) < groups * self.n_samples_per_prompt:
            return []
        rows = [] if self.group_tag is None else sorted(as_list(ready))
        tags = tags_of(partition, rows)
        if self.group_tag is None or tags is None:
            return consecutive(ready, self.n_samples_per_prompt, groups)
        named, unnamed = _by_tag(rows, tags, self.group_tag)
        if not named:
            return consecutive(unnamed, self.n_samples_per_prompt, groups)
        return self._merge(named, unnamed, groups)

    def _merge(self, named: dict[Hashable, list[int]], unnamed: list[int], groups: int) -> list[int]:
        n = self.n_samples_per_prompt
        runs = consecutive(unnamed, n, len(unnamed) // n, partial=True)
        found = [rows[i : i + n] for rows in (*named.values(), runs) for i in range(0, len(rows) - n + 1, n)]
        if len(found) < groups:
            return []
        found.sort()  # groups share no row, so this compares their smallest indexes
        return [index for group in found[:groups] for index in group]


def _by_tag(
    ready: list[int], tags: list[Mapping[str, Any] | None], group_tag: str
) -> tuple[dict[Hashable, list[int]], list[int]]:
    """(group -> its rows, rows without a group)."""
    named: dict[Any, list[int]] = {}
    unnamed: list[int] = []
    for index, row in zip(ready, tags, strict=True):
        group = row.get(group_tag) if row else None
        if group is None:
            unnamed.append(index)
            continue
        try:
            named.setdefault(group, []).append(index)
        except TypeError:
            raise InvalidSampling(f"row {index}: tag {group_tag!r} names a group, so it cannot be {group!r}") from None
    return named, unnamed


def consecutive(ready: Ready, n: int, groups: int, partial: bool = False) -> list[int]:
    """The rows of the first `groups` runs of `n` consecutive indexes, or [] when there are fewer (all, if `partial`).

    Looks at a prefix first and at more only when it does not hold enough, since runs never depend on what follows.
    """
    rows: list[int] | npt.NDArray[np.int64] = np.sort(ready) if isinstance(ready, np.ndarray) else sorted(ready)
    need = groups * n
    head = _unbroken_head(rows, need)
    if head is not None:
        return head
    seen = need
    while True:
        seen = min(2 * seen + n, len(rows))
        picked = _runs(np.asarray(rows[:seen], np.int64), n)
        if len(picked) >= need or seen == len(rows):
            return picked[:need].tolist() if partial or len(picked) >= need else []


def _unbroken_head(rows: list[int] | npt.NDArray[np.int64], need: int) -> list[int] | None:
    """The first `need` rows when they are one run, which is the usual case and needs no array."""
    if not 0 < need <= len(rows) or rows[need - 1] - rows[0] != need - 1:
        return None
    expected = list(range(int(rows[0]), int(rows[0]) + need))
    return expected if as_list(rows[:need]) == expected else None


def _runs(rows: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.int64]:
    """The rows in complete runs: of each unbroken stretch the first multiple of `n` rows."""
    if len(rows) < n:
        return rows[:0]
    starts = np.concatenate(([0], np.flatnonzero(np.diff(rows) != 1) + 1))
    lengths = np.diff(starts, append=len(rows))
    offset = np.arange(len(rows)) - np.repeat(starts, lengths)
    return rows[offset < np.repeat(lengths // n * n, lengths)]
