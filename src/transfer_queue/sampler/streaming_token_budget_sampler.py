"""Micro-batches of about as many tokens as a budget says, for ranks that train while rows are still being made."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.errors import InvalidSampling, MissingParameter
from transfer_queue.sampler.base import Dealt, PartitionView, Sampled, check_hashable, positive, tags_of, whole_number
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.seqlen_balanced_sampler import LENGTH_TAG, _is_length, get_seqlen_balanced_partitions

log = logging.getLogger("transfer_queue.sampler")

BUDGET = "token_budget"
# Of a sampling_config, beside what every sampler of this package knows. The last four are notes of those who ask.
KEYS = (
    BUDGET, "dp_size", "allow_underfill", "rollout_mini_index", "max_samples", "consumed_samples", "remaining_samples",
)  # fmt: skip


class StreamingTokenBudgetSampler(GRPOGroupNSampler):
    """Gives each of `dp_size` ranks, for each `batch_index`, rows whose tokens stay within a `token_budget`.

    Ready rows are dealt out to all ranks in rounds: whole groups, `n_samples_per_prompt * dp_size *
    balance_unit_multiplier` rows at most, divided so that ranks get about the same number of tokens, and where it goes,
    of rows. What a rank was dealt and has not fetched is kept for it. The first request for a `batch_index` deals until
    every rank has a budget's worth, or no group is left, and cuts a slice for each rank that has rows: the longest
    prefix within the budget, one row at least. Others who ask for the same rank and batch get the same slice. A rank
    that has no rows gets nothing, until there are some: they may come back from a rank that did not use them. Once all
    rows that the partition was declared to get are written (`production_done`) the rest is dealt out, parts of groups
    too.

    A row's tokens are its tag `total_lengths`; one without it counts as a whole budget. A slice is remembered until one
    of its rows is cleared, or offered again because its lease ended. Without `token_budget` this is its parent.
    """

    def __init__(
        self, n_samples_per_prompt: int = 1, balance_unit_multiplier: int = 1, group_tag: str | None = "group_id"
    ) -> None:
        """Raises:
        InvalidSampling: `balance_unit_multiplier` is not a positive int, or as `GRPOGroupNSampler`.
        """
        super().__init__(n_samples_per_prompt, group_tag)
        self.balance_unit_multiplier = positive(balance_unit_multiplier, "balance_unit_multiplier")
        # partition -> task -> rank -> rows that were dealt to it and not fetched; and -> row -> its tokens
        self._buckets: dict[str, dict[str, dict[int, list[int]]]] = {}
        self._resolved_lengths: dict[str, dict[str, dict[int, float]]] = {}
        # the batch that each rank asked for last, and where the first of them began
        self._asked: dict[str, dict[str, dict[int, Any]]] = {}
        self._dummy_rounds: dict[Any, Any] = {}  # for subclasses that pad
        self._remembered: dict[tuple[str, str], set[int]] = {}  # the rows of all slices, where they were looked up

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Sampled:
        """See `BaseSampler.sample`; what is sampled is consumed. `batch_size` counts only without `token_budget`.

        Raises:
            InvalidSampling: a parameter is missing or wrong, `partition` too, or a row's length is not a number.
        """
        where = (partition_id, task_name)
        if kwargs.get(BUDGET) is None:
            known_to = self._buckets.get(partition_id, {}).get(task_name)
            free = self._free(where, ready_indexes) if known_to else ready_indexes
            return super().sample(free, batch_size, task_name, partition_id, **kwargs)
        budget, rank, size = _terms(kwargs)
        self._leave_out(where, size, ready_indexes)
        batch, partition = kwargs.get("batch_index"), kwargs.get("partition")
        if batch is not None:
            self._comes_to(where, rank, batch, size, ready_indexes)
        known = self._sliced(where, rank).get(batch)
        if batch is not None and known is not None:
            return list(known[0]), list(known[1])
        if partition is None:
            raise InvalidSampling("StreamingTokenBudgetSampler needs the partition, for the lengths of its rows")
        underfill, done = bool(kwargs.get("allow_underfill", True)), bool(kwargs.get("production_done"))
        if batch is None:
            self._deal(where, size, budget, ready_indexes, partition, done)
            rows = self._slice(where, rank, budget, underfill or done)
            return rows, list(rows)
        self._prepare_batch_index(*where, batch, size, budget, underfill, ready_indexes, partition, done)
        self._bring_forward(where, rank, batch, ready_indexes)
        found = self._sliced(where, rank).get(batch, ((), ()))
        return list(found[0]), list(found[1])

    def _prepare_batch_index(
        self,
        partition_id: str,
        task_name: str,
        batch_index: Any,
        dp_size: int,
        token_budget: int,
        allow_underfill: bool,
        ready_indexes: list[int],
        partition: PartitionView,
        production_done: bool = False,
    ) -> None:
        """Remember a slice of this batch for every rank that has none and has rows, and that will ask for it next."""
        where = (partition_id, task_name)
        self._deal(where, dp_size, token_budget, ready_indexes, partition, production_done)
        for rank in range(dp_size):
            if batch_index in self._sliced(where, rank) or not self._is_next(where, rank, batch_index):
                continue
            rows = self._slice(where, rank, token_budget, allow_underfill or production_done)
            if rows:  # nothing is no answer: whoever asks for it waits
                self._cache_result(partition_id, task_name, rank, batch_index, (rows, list(rows)))

    def _is_next(self, where: tuple[str, str], rank: int, batch_index: Any) -> bool:
        """Whether it is the first batch without a slice that the rank will ask for. It asks for no earlier one, and
        could not come to a later one as long as it waits for rows that are kept for that."""
        partition, task = where
        asked = self._asked.get(partition, {}).get(task, {}).get(rank)
        if not isinstance(asked, int) or not isinstance(batch_index, int):
            return True
        sliced = self._sliced(where, rank)
        return asked <= batch_index and all(earlier in sliced for earlier in range(asked, batch_index))

    def _comes_to(self, where: tuple[str, str], rank: int, batch_index: Any, size: int, ready: list[int]) -> None:
        """The rank asks for this batch. What was kept for the one before, after it had given that back, is free."""
        partition, task = where
        asked = self._asked.setdefault(partition, {}).setdefault(task, {})
        if not asked:
            asked.update(dict.fromkeys(range(size), batch_index))
        before, asked[rank] = asked.get(rank), batch_index
        sliced = self._sliced(where, rank)
        if before in sliced and before != batch_index and _all_in(sliced[before][0], ready):
            del sliced[before]
            self._remembered.pop(where, None)

    def _leave_out(self, where: tuple[str, str], size: int, ready: list[int]) -> None:
        """What was kept for ranks that there are no more, as a loop went on with fewer, is free."""
        partition, task = where
        buckets = self._buckets.get(partition, {}).get(task, {})
        for gone in [rank for rank in buckets if rank >= size]:
            del buckets[gone]
            sliced = self._sliced(where, gone)
            for batch in [batch for batch, (rows, _) in sliced.items() if _all_in(rows, ready)]:
                del sliced[batch]
            self._remembered.pop(where, None)

    def _bring_forward(self, where: tuple[str, str], rank: int, batch_index: Any, ready: list[int]) -> None:
        """Where nothing is left for this batch, as what it had was given back and dealt to others, the rank gets what
        was kept for its next one: it could not come to that."""
        sliced = self._sliced(where, rank)
        if not sliced or batch_index in sliced or not isinstance(batch_index, int):
            return
        for later in sorted(one for one in sliced if isinstance(one, int) and one > batch_index):
            if _all_in(sliced[later][0], ready):  # nobody fetched it
                sliced[batch_index] = sliced.pop(later)
                return

    def _cache_result(self, partition_id: str, task_name: str, dp_rank: int, batch_index: Any, result: Sampled) -> None:
        if batch_index is not None:
            ranks = self._states.setdefault(partition_id, {}).setdefault(task_name, {})
            ranks.setdefault(dp_rank, {})[batch_index] = result
            held = self._remembered.get((partition_id, task_name))
            if held is not None:
                held.update(result[0])

    def _sliced(self, where: tuple[str, str], rank: int) -> dict[Any, Any]:
        """What is remembered for a rank, by batch."""
        partition, task = where
        return self._states.get(partition, {}).get(task, {}).get(rank, {})

    def _bucket(self, where: tuple[str, str], rank: int) -> list[int]:
        partition, task = where
        return self._buckets.setdefault(partition, {}).setdefault(task, {}).setdefault(rank, [])

    def _lengths(self, where: tuple[str, str]) -> dict[int, float]:
        partition, task = where
        return self._resolved_lengths.setdefault(partition, {}).setdefault(task, {})

    # dealing

    def _free(self, where: tuple[str, str], ready_indexes: list[int]) -> list[int]:
        """The ready rows that are nobody's. A slice that its rank has not fetched is ready still, and no longer in a
        bucket."""
        partition, task = where
        sliced = self._remembered.get(where)
        if sliced is None:
            ranks = self._states.get(partition, {}).get(task, {})
            sliced = {row for batches in ranks.values() for rows, _ in batches.values() for row in rows}
            self._remembered[where] = sliced
        dealt = {row for rows in self._buckets.get(partition, {}).get(task, {}).values() for row in rows}
        return [row for row in ready_indexes if row not in dealt and row not in sliced]

    def _deal(
        self,
        where: tuple[str, str],
        dp_size: int,
        token_budget: int,
        ready_indexes: list[int],
        partition: PartitionView,
        production_done: bool,
    ) -> None:
        """Deal ready rows to the ranks in rounds, until each has a budget's worth or there are no whole groups."""
        buckets = [self._bucket(where, rank) for rank in range(dp_size)]
        free = self._free(where, ready_indexes)
        lengths = self._lengths(where)
        while free and any(sum(lengths[row] for row in bucket) < token_budget for bucket in buckets):
            rows = self._whole_groups(free, dp_size * self.balance_unit_multiplier, partition)
            if not rows and production_done:
                rows = sorted(free)
            if not rows:
                break
            self._divide(rows, buckets, lengths, token_budget, partition)
            gone = set(rows)
            free = [row for row in free if row not in gone]

    def _whole_groups(self, free: list[int], most: int, partition: PartitionView) -> list[int]:
        """The rows of as many whole groups as there are, `most` at most."""
        low, high = 0, min(most, len(free) // self.n_samples_per_prompt)
        found: list[int] = []
        while low < high:
            middle = (low + high + 1) // 2
            rows = self._pick(free, middle, partition)
            if rows:
                low, found = middle, rows
            else:
                high = middle - 1
        return found

    def _divide(
        self,
        rows: list[int],
        buckets: list[list[int]],
        lengths: dict[int, float],
        token_budget: int,
        partition: PartitionView,
    ) -> None:
        mine = _tokens(rows, token_budget, partition)
        lengths.update(zip(rows, mine, strict=True))
        if len(rows) >= len(buckets):
            parts = get_seqlen_balanced_partitions(mine, len(buckets), equal_size=len(rows) % len(buckets) == 0)
            for bucket, part in zip(buckets, parts, strict=True):
                bucket += [rows[place] for place in part]
            return
        for row in rows:  # fewer than ranks: to those that have the least
            min(buckets, key=lambda bucket: sum(lengths[one] for one in bucket)).append(row)

    def _slice(self, where: tuple[str, str], rank: int, token_budget: int, allow_underfill: bool) -> list[int]:
        """Take what fits into the budget from what the rank was dealt; nothing where that is too little."""
        bucket, lengths = self._bucket(where, rank), self._lengths(where)
        if not bucket or (not allow_underfill and sum(lengths[row] for row in bucket) < token_budget):
            return []
        count = self._select_up_to_budget(bucket, lengths, token_budget)
        rows = bucket[:count]
        del bucket[:count]
        for row in rows:
            lengths.pop(row, None)
        return rows

    def _select_up_to_budget(self, bucket: list[int], resolved_lengths: Mapping[int, float], token_budget: int) -> int:
        """How many of the first rows fit into the budget together; one at least."""
        tokens: float = 0
        for count, row in enumerate(bucket):
            tokens += resolved_lengths.get(row, 0)
            if count and tokens > token_budget:
                return count
        return len(bucket)

    # the sampler's other duties

    def deal(self, ready_indexes: list[int], batch_size: int, ranks: Sequence[int], **kwargs: Any) -> Dealt:
        """As its parent: a batch that is dealt to ranks has no budget."""
        shares, consumed = super().deal(ready_indexes, batch_size, ranks, **kwargs)
        return self._by_group(shares) if type(self).sample is StreamingTokenBudgetSampler.sample else shares, consumed

    def check_request(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """InvalidSampling for what `sample` refuses; MissingParameter (a ValueError) without `dp_rank` or `dp_size`."""
        if type(self).sample is not StreamingTokenBudgetSampler.sample:
            super().check_request(batch_size, sampling_config)
            return
        super().check_request(batch_size, {k: v for k, v in sampling_config.items() if k not in KEYS})
        if sampling_config.get(BUDGET) is None:
            self._groups_in(batch_size)
        else:
            _terms(sampling_config)

    def least_ready(self, batch_size: int) -> int:
        """None: what was dealt before is not looked for among the ready rows."""
        return 0

    def clear_cache(self, partition_id: str) -> None:
        """Forgets all batches of a partition, and what was dealt of it."""
        super().clear_cache(partition_id)
        for where in [where for where in self._remembered if where[0] == partition_id]:
            del self._remembered[where]
        for held in (self._buckets, self._resolved_lengths, self._asked):
            held.pop(partition_id, None)
        for key in [key for key in self._dummy_rounds if partition_id in (key, *key[:1])]:
            del self._dummy_rounds[key]

    def _forget_of_task(self, partition: str, task: str, indexes: set[int]) -> None:
        super()._forget_of_task(partition, task, indexes)
        self._remembered.pop((partition, task), None)  # a slice is dropped with all its rows
        self._take_away(partition, task, indexes)

    def forget(self, partition: str, indexes: set[int]) -> None:
        """Drops every slice that contains one of these rows; they are dealt to nobody any more."""
        super().forget(partition, indexes)
        for task in list(self._buckets.get(partition, {})):
            self._take_away(partition, task, indexes)

    def offer_again(self, partition: str, task: str, indexes: set[int]) -> None:
        self._forget_of_task(partition, task, indexes)

    def _take_away(self, partition: str, task: str, indexes: set[int]) -> None:
        for bucket in self._buckets.get(partition, {}).get(task, {}).values():
            bucket[:] = [row for row in bucket if row not in indexes]
        lengths = self._resolved_lengths.get(partition, {}).get(task, {})
        for row in indexes & lengths.keys():
            del lengths[row]

    def save_checkpoint(self) -> dict[str, Any]:
        """The state that `load_checkpoint` restores: plain dicts and lists."""
        dealt = {"_buckets": self._buckets, "_resolved_lengths": self._resolved_lengths, "_asked": self._asked}
        return {**super().save_checkpoint(), **dealt}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Restores what `save_checkpoint` returned."""
        super().load_checkpoint(state)
        self._buckets, self._resolved_lengths = state["_buckets"], state["_resolved_lengths"]
        self._asked = state.get("_asked", {})  # older versions do not know it
        self._remembered = {}
        for batches in (
            batches for tasks in self._states.values() for ranks in tasks.values() for batches in ranks.values()
        ):
            for batch in [batch for batch, (rows, _) in batches.items() if not rows]:  # of older versions
                del batches[batch]


def _all_in(rows: list[int], ready: list[int]) -> bool:
    """Whether all are among the ready rows, which ascend."""
    places = [bisect_left(ready, row) for row in rows]
    return all(place < len(ready) and ready[place] == row for place, row in zip(places, rows, strict=True))


def _terms(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """The budget, the rank and the number of ranks."""
    rank, size = config.get("dp_rank"), config.get("dp_size")
    if rank is None or size is None:
        raise MissingParameter("token_budget needs dp_rank and dp_size in the sampling_config")
    budget = whole_number(config[BUDGET], BUDGET)
    rank, size = whole_number(rank, "dp_rank"), whole_number(size, "dp_size")
    if budget <= 0 or not 0 <= rank < size:
        raise InvalidSampling(f"token_budget {budget} for dp_rank {rank} of {size}")
    check_hashable(batch_index=config.get("batch_index"))
    return budget, rank, size


def _tokens(rows: list[int], token_budget: int, partition: PartitionView) -> list[float]:
    """The length of each row; the whole budget for one that says nothing, so that it does not make a batch too long."""
    tags = tags_of(partition, rows) or [None] * len(rows)
    lengths: list[float] = [token_budget if not row else row.get(LENGTH_TAG, token_budget) for row in tags]
    silent = [index for index, row in zip(rows, tags, strict=True) if not row or LENGTH_TAG not in row]
    if silent:
        log.warning(
            "%d rows without the tag %r count as %d tokens: %s", len(silent), LENGTH_TAG, token_budget, silent[:8]
        )
    for index, length in zip(rows, lengths, strict=True):
        if not _is_length(length):
            raise InvalidSampling(f"row {index}: tag {LENGTH_TAG!r} is a number of tokens, so it cannot be {length!r}")
    return lengths
