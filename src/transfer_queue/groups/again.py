"""A trainer goes back to a step that it marked: what it is handed once more, and what it is not."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from transfer_queue.groups.choice import due_groups
from transfer_queue.groups.pool import PoolCore


class GroupsDue(NamedTuple):
    """How much is to come again. `lost`: groups that do not, for some of their rows are gone."""

    batches: int
    groups: int
    lost: int


def resume(pool: PoolCore, step: int) -> GroupsDue:
    """What was used up after a marked step, and what somebody has, is due. Raises as `GroupSteps.go_back`."""
    used = pool.steps.go_back(step)
    again = [one.group for one in used if one.group is not None and one.group.name not in pool.groups]
    lent = [group for group in pool.groups.values() if group.state == "lent"]
    for group in lent:
        group.is_again = True
    pool.release([group.name for group in lent])
    pool.revive(again)
    due = due_groups(pool.groups.values())
    return GroupsDue(len({group.batch for group in due}), len(due), len(used) - len(again))


def unlike_before(pool: PoolCore, least: int, most: int) -> list[str]:
    """The groups that are due, up to the first batch of `least` to `most`: the loop that asks is another one now, or
    these batches have lost groups."""
    names: list[str] = []
    for _, batch in itertools.groupby(due_groups(pool.groups.values()), key=lambda group: group.batch):
        found = [group.name for group in batch]
        if (len(found) >= least or pool.nothing_comes) and len(found) <= most:
            break
        names += found
    return names
