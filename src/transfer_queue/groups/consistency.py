"""Whether a pool agrees with itself: so after each event, and in a state that is loaded."""

from __future__ import annotations

from collections import Counter

from transfer_queue.groups.pool import PoolCore


def is_consistent(pool: PoolCore) -> bool:
    """Whether groups, rows, tickets, steps and counters agree."""
    live, state = list(pool.groups.values()), pool.state
    counts = [sum(group.state == kind for group in live) for kind in ("open", "sealed", "due")]
    rows = [row for group in (*live, *pool.steps.groups) for row in group.rows]
    tickets = [group.ticket for group in live if group.ticket is not None] + [*state.returned, *state.reserved]
    by_source = Counter(group.source for group in live)
    return (
        counts == [pool.num_open, pool.num_sealed, pool.num_due]
        and all(group.name == name and group.is_sound for name, group in state.groups.items())
        and len(rows) == len(pool.owners) + len(pool.steps.owners) == len(set(rows))
        and not state.groups.keys() & state.fates.keys()
        and state.sources_of.keys() <= state.fates.keys()
        and set(state.sources_of.values()) <= state.sources.keys()
        and len(set(tickets)) == len(tickets)
        and all(0 <= ticket < state.next_ticket for ticket in tickets)
        and by_source.keys() <= state.sources.keys()
        and all(one.opened == by_source[name] + one.consumed + one.evicted for name, one in state.sources.items())
        and all(group.number < state.next_number for group in live)
        and pool.num_inserted == sum(one.sealed for one in state.sources.values())
        and sum(group.times_sampled for group in live) <= state.sampled
        and state.forgiven >= 0.0
        and pool.work.has(live)
        and all(group.is_held or not group.is_surplus for group in live)
        and all(group.is_again or group.state != "due" for group in live)
        and pool.steps.marked == sorted(pool.steps.marked)
    )
