"""A batch for data-parallel ranks: what the sampler picks for all of them, and in the place of what is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from transfer_queue.controller.dealing import Dealing, RankGroup, Share
from transfer_queue.controller.readiness import ReadyView, Slots
from transfer_queue.controller.sampler_calls import SamplerCalls, refused_rest
from transfer_queue.controller.sampler_view import SamplerView
from transfer_queue.controller.staleness import for_sampler
from transfer_queue.controller.steps import Steps
from transfer_queue.controller.table import Table
from transfer_queue.errors import InvalidInput
from transfer_queue.wire.messages import Fetch


class SharePicker:
    """Asks the sampler for the shares that `dealing` keeps; `steps` hear of what is dealt."""

    def __init__(self, dealing: Dealing, calls: SamplerCalls, steps: Steps) -> None:
        self._dealing, self._calls, self._steps = dealing, calls, steps

    def deal(self, message: Fetch, table: Table, view: ReadyView, group: RankGroup) -> bool:
        """Deal a batch; False when its rows are not ready yet."""
        ranks, size = self._dealing.to_deal(message, group)
        total, loose = size * len(ranks), self._dealing.loose(table, message)
        num_ready = view.count - int(np.count_nonzero(view.ready[loose]))
        if num_ready < total and self._is_rest(message, table, group, num_ready):
            total = num_ready
        elif num_ready < self._calls.ask(self._calls.sampler.least_ready, total):
            return False
        try:
            shares = self._shares(message, table, view, loose, total, ranks) if total else [[] for _ in ranks]
        except InvalidInput as error:
            if self._dealing.let_go_refused(group):
                return self.deal(message, table, view, group)
            raise refused_rest(error, num_ready if total == num_ready else 0, table.name) from None
        if not self._dealing.enter(table, message, group, ranks, shares):
            is_rest = total == num_ready > 0
            return is_rest and self._dealing.let_go_refused(group) and self.deal(message, table, view, group)
        taken = {rank: np.array(share, np.int64) for rank, share in zip(ranks, shares, strict=True)}
        self._steps.dealt(message, taken, max(map(len, shares)))
        return True

    def _is_rest(self, message: Fetch, table: Table, group: RankGroup, num_ready: int) -> bool:
        """Whether the ready rows are all that the ranks will ever get, whatever the sampler has to see."""
        if not message.until_done or self._dealing.num_left(table, message, group) != num_ready:
            return False
        return not num_ready or table.is_filled

    def _shares(
        self, message: Fetch, table: Table, view: ReadyView, loose: Slots, total: int, ranks: Sequence[int]
    ) -> list[list[int]]:
        """What the sampler picks for these ranks together."""
        needed = self._calls.needs(total)
        slots = view.first(None if needed is None else needed + len(loose), table.size)
        candidates = table.index[slots[~np.isin(slots, loose)] if len(loose) else slots].tolist()
        config = {**for_sampler(message.sampling), "partition_id": message.partition, "task_name": message.task}
        config["partition"] = SamplerView(table)
        shares, used = self._calls.deal(candidates, total, ranks, **config)
        extra = np.setdiff1d(np.array(used, np.int64), np.array([row for share in shares for row in share], np.int64))
        task, slots = table.task(message.task), table.slots_of(extra)
        keep = task.reserve if self._calls.sampler.reserves else task.consume
        keep(task.offered(slots[slots >= 0]))
        return shares

    def mend(self, message: Fetch, table: Table, view: ReadyView, group: RankGroup, share: Share) -> None:
        """Complete a share of which others took rows meanwhile, as far as rows are ready."""
        num_taken, loose = self._dealing.mend(table, message, group, share), self._dealing.loose(table, message)
        num_taken = min(num_taken, share.wanted(message.used) - len(share.rows))
        if num_taken <= 0 or view.count - int(np.count_nonzero(view.ready[loose])) < num_taken:
            return
        with contextlib.suppress(InvalidInput):  # not a number of rows that the sampler picks
            rows = self._shares(message, table, view, np.union1d(loose, table.slots_of(share.rows)), num_taken, [0])[0]
            self._dealing.replace(table, message, group, share, rows)
