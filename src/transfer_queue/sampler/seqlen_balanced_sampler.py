"""Batches whose data-parallel ranks get about the same number of tokens."""

from __future__ import annotations

import heapq
import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from transfer_queue.errors import InvalidSampling, NotDivisible
from transfer_queue.sampler.base import (
    Dealt,
    PartitionView,
    Sampled,
    check_hashable,
    divided,
    positive,
    tags_of,
    whole_number,
)
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler

LENGTH_TAG = "total_lengths"


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Picks groups as `GRPOGroupNSampler` does, for all ranks at once, and divides them by their tokens.

    The first request for a `batch_index` reserves `dp_size` times `batch_size` rows; each of the `dp_size` ranks then
    gets its `batch_size` of them, in whole groups, whenever it asks. A row's tokens are its tag `total_lengths`, 1
    where it has none. A share is remembered until one of its rows is cleared, or offered again because its lease
    ended; a rank that asks again after that gets other rows, of the same number.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1, group_tag: str | None = "group_id") -> None:
        """Raises:
        InvalidSampling: `dp_size` is not a positive int, or as `GRPOGroupNSampler`.
        """
        super().__init__(n_samples_per_prompt, group_tag)
        self.dp_size = positive(dp_size, "dp_size")
        # partition -> task -> batch_index -> the rows of each rank
        self._balanced_cache: dict[str, dict[str, dict[Any, list[list[int]]]]] = {}  # an empty list: no longer

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Sampled:
        """See `BaseSampler.sample`. `dp_rank` and `batch_index` are 0 when they are not given.

        Returns:
            (the rows of this rank, the rows of all ranks). Nothing for a `dp_rank` of `dp_size` or more.

        Raises:
            InvalidSampling: `batch_size`, the rows of one rank, is negative or no multiple of `n_samples_per_prompt`;
                `dp_rank` is negative or no int; a row's length is not a number; or its group cannot be hashed.
        """
        rank, batch = _rank_and_batch(kwargs)
        shares = self._known(partition_id, task_name, batch)
        if rank >= self.dp_size:
            return [], []
        if shares is None:
            groups = self._groups_in(batch_size)
            rows = self._pick(ready_indexes, groups * self.dp_size, kwargs.get("partition"))
            if not rows:
                return [], []
            shares = self._divide(rows, kwargs.get("partition"), self.dp_size)
            self._balanced_cache.setdefault(partition_id, {}).setdefault(task_name, {})[batch] = shares
        if not shares[rank]:
            shares[rank] = self._pick(ready_indexes, self._groups_in(batch_size), kwargs.get("partition"))
        return list(shares[rank]), list(itertools.chain.from_iterable(shares))

    def deal(self, ready_indexes: list[int], batch_size: int, ranks: Sequence[int], **kwargs: Any) -> Dealt:
        """See `BaseSampler.deal`. Shares of equally many groups are balanced by their tokens; nothing is remembered."""
        if not self._is_own():
            return super().deal(ready_indexes, batch_size, ranks, **kwargs)
        rows = self._pick(ready_indexes, self._groups_in(batch_size), kwargs.get("partition"))
        if not rows or batch_size % (self.n_samples_per_prompt * len(ranks)):
            return divided(rows, len(ranks), self.n_samples_per_prompt), rows
        return self._divide(rows, kwargs.get("partition"), len(ranks)), rows

    def _known(self, partition_id: str, task_name: str, batch: Any) -> list[list[int]] | None:
        return self._balanced_cache.get(partition_id, {}).get(task_name, {}).get(batch)

    def _divide(self, rows: list[int], partition: PartitionView | None, parts_wanted: int) -> list[list[int]]:
        n = self.n_samples_per_prompt
        lengths = _lengths(rows, partition)
        groups = [sum(lengths[i : i + n]) for i in range(0, len(rows), n)]
        parts = get_seqlen_balanced_partitions(groups, parts_wanted, equal_size=True)
        return [[row for group in part for row in rows[group * n : group * n + n]] for part in parts]

    @property
    def reserves(self) -> bool:
        return True

    def check_request(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """InvalidSampling for what `sample` refuses, and for a `dp_rank` of `dp_size` or more, which would wait."""
        super().check_request(batch_size, sampling_config)
        if not self._is_own():
            return
        self._groups_in(batch_size)
        rank, _ = _rank_and_batch(sampling_config)
        if rank >= self.dp_size:
            raise InvalidSampling(f"dp_rank {rank}: the sampler divides batches among dp_size={self.dp_size} ranks")

    def _is_own(self) -> bool:
        return type(self).sample is SeqlenBalancedSampler.sample

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether the batch of this `batch_index` is divided already and has a share for this `dp_rank`."""
        rank, batch = _rank_and_batch(sampling_config or {})
        shares = self._known(partition_id, task_name, batch)
        return shares is not None and rank < self.dp_size and bool(shares[rank])

    def clear_cache(self, partition_id: str) -> None:
        """Forgets all batches of a partition."""
        super().clear_cache(partition_id)
        self._balanced_cache.pop(partition_id, None)

    def forget(self, partition: str, indexes: set[int]) -> None:
        """Drops every share that contains one of these rows, and batches without shares left."""
        super().forget(partition, indexes)
        for task in list(self._balanced_cache.get(partition, {})):
            self._drop_shares(partition, task, indexes)

    def offer_again(self, partition: str, task: str, indexes: set[int]) -> None:
        self._forget_of_task(partition, task, indexes)
        self._drop_shares(partition, task, indexes)

    def _drop_shares(self, partition: str, task: str, indexes: set[int]) -> None:
        tasks = self._balanced_cache.get(partition, {})
        batches = tasks.get(task, {})
        for batch, shares in list(batches.items()):
            shares[:] = [share if indexes.isdisjoint(share) else [] for share in shares]
            if not any(shares):
                del batches[batch]
        if not batches:
            tasks.pop(task, None)
        if not tasks:
            self._balanced_cache.pop(partition, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """The state that `load_checkpoint` restores: plain dicts and lists."""
        return {**super().save_checkpoint(), "_balanced_cache": self._balanced_cache}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Restores what `save_checkpoint` returned."""
        super().load_checkpoint(state)
        self._balanced_cache = state["_balanced_cache"]


def _rank_and_batch(config: Mapping[str, Any]) -> tuple[int, Any]:
    rank, batch = config.get("dp_rank"), config.get("batch_index")
    rank = 0 if rank is None else whole_number(rank, "dp_rank")
    if rank < 0:
        raise InvalidSampling(f"dp_rank {rank} must be greater than or equal to 0")
    check_hashable(batch_index=batch)
    return rank, 0 if batch is None else batch


def _lengths(rows: list[int], partition: PartitionView | None) -> list[float]:
    tags = tags_of(partition, rows)
    if tags is None:
        return [1] * len(rows)
    lengths: list[float] = [1 if not row else row.get(LENGTH_TAG, 1) for row in tags]
    for row, length in zip(rows, lengths, strict=True):
        if not _is_length(length):
            raise InvalidSampling(
                f"row {row}: tag {LENGTH_TAG!r} is the row's number of tokens, so it cannot be {length!r}"
            )
    return lengths


def _is_length(value: object) -> bool:
    if type(value) is int:
        return value >= 0
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and 0 <= value < math.inf  # type: ignore[operator]


# ---- division into parts of about the same sum ----

Part: TypeAlias = tuple[float, int, int]  # sum, number of items, node; see `_Forest`
NOBODY: Part = (0, 0, -1)


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """`karmarkar_karp` under the name that is used for lengths of sequences."""
    return karmarkar_karp(seqlen_list, k_partitions, equal_size)


def karmarkar_karp(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """The positions of `seqlen_list` in `k_partitions` parts of about the same sum, ascending in each part.

    Every position is in exactly one part and no part is empty. The same input gives the same result.
    `equal_size`: all parts have the same number of items.

    The largest differencing method (N. Karmarkar and R. M. Karp, 1982): a division starts as one item, or for parts of
    equal size as k items of similar length, one in each part. The two divisions whose parts differ most are joined, the
    largest part of one with the smallest of the other, until one division is left. O(n k log k + n log n).

    Raises:
        NotDivisible: `k_partitions` is below 1; there are fewer items; or with `equal_size`, the number of items is
            not a multiple of it. An InvalidSampling and an AssertionError.
        InvalidSampling: `k_partitions` is not an int, or an item is not a number of 0 or more.
    """
    lengths = list(seqlen_list)
    k = _number_of_parts(lengths, k_partitions, equal_size)
    forest, divisions = _Forest(), []
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    step = k if equal_size else 1
    for number, at in enumerate(range(0, len(order), step)):
        items = [(lengths[i], 1, forest.leaf(i)) for i in order[at : at + step]]
        divisions.append(_division(items + [NOBODY] * (k - step), number))
    heapq.heapify(divisions)
    for number in range(len(divisions), 2 * len(divisions) - 1):
        first, second = heapq.heappop(divisions)[2], heapq.heappop(divisions)[2]
        joined = [forest.join(large, small) for large, small in zip(first, reversed(second), strict=True)]
        heapq.heappush(divisions, _division(joined, number))
    return [forest.items(part) for part in divisions[0][2]]


def _number_of_parts(lengths: list[float], k_partitions: int, equal_size: bool) -> int:
    k = whole_number(k_partitions, "k_partitions")
    if k < 1 or len(lengths) < k:
        raise NotDivisible(f"{len(lengths)} items cannot make k_partitions={k_partitions} parts")
    if equal_size and len(lengths) % k:
        raise NotDivisible(f"{len(lengths)} items do not divide into {k} parts of equal size")
    for position, length in enumerate(lengths):
        if not _is_length(length):
            raise InvalidSampling(f"item {position} is a length, so it cannot be {length!r}")
    return k


def _division(parts: list[Part], number: int) -> tuple[float, int, list[Part]]:
    """A heap's entry: the largest difference first; `number` decides between equal ones."""
    parts.sort(reverse=True)  # of equal sums the one with more items, so that empty parts come last
    return parts[-1][0] - parts[0][0], number, parts


class _Forest:
    """The members of parts as trees: joining two parts takes the same time for large ones as for small ones."""

    def __init__(self) -> None:
        self._nodes: list[int | tuple[int, int]] = []  # an item, or two nodes

    def leaf(self, item: int) -> int:
        self._nodes.append(item)
        return len(self._nodes) - 1

    def join(self, one: Part, other: Part) -> Part:
        if not one[1] or not other[1]:
            return one if one[1] else other
        self._nodes.append((one[2], other[2]))
        return one[0] + other[0], one[1] + other[1], len(self._nodes) - 1

    def items(self, part: Part) -> list[int]:
        """Ascending."""
        found, left = [], [part[2]] if part[1] else []
        while left:
            node = self._nodes[left.pop()]
            if isinstance(node, tuple):
                left.extend(node)
            else:
                found.append(node)
        return sorted(found)
