"""A step of a loop that takes rows for its tasks and groups from pools: marked, and gone back to, as one.

Whatever can be refused is refused before anything has changed.
"""

from __future__ import annotations

from transfer_queue.controller.fetch import Fetching
from transfer_queue.controller.group_checks import check_step
from transfer_queue.controller.groups import GroupPools
from transfer_queue.wire import messages as m


def mark(message: m.MarkStep, fetching: Fetching, groups: GroupPools, session: bytes) -> m.Reply:
    """Raises as `Fetching.mark` and `GroupSteps.check`."""
    check_step(message.step)
    for partition in message.pools:
        pool = groups.pool(partition)
        pool.steps.check(message.step, pool.policy)
    reply = fetching.mark(message, session)
    for partition in dict.fromkeys(message.pools):
        groups.rules[m.MarkPool](m.MarkPool(0, partition, message.step))
    return reply


def resume(message: m.ResumeStep, fetching: Fetching, groups: GroupPools) -> m.StepResumed:
    """Raises as `Steps.resume` and `GroupSteps.check_marked`."""
    for partition in message.pools:
        groups.pool(partition).steps.check_marked(message.step)
    reply = fetching.steps.resume(message)
    for partition in dict.fromkeys(message.pools):
        found = groups.resume(m.ResumePool(0, partition, message.step))  # and not by the rule: the fact is this request
        reply.pools[partition] = found.batches, found.groups, found.lost
    return reply
