"""How often the map of a partition may be asked for: its cost grows with rows times fields."""

from __future__ import annotations

from typing import NamedTuple

from transfer_queue.wire.messages.overview import PartitionOverview

MAX_RUNS = 512
SHARE = 0.01  # of one core of the server, while the partition changes
LATEST_S = 10.0  # what a task has on lease may be other rows while all counts stay
GROWTH = 1.25


class MapSeen(NamedTuple):
    """A map as JSON, what one costs, when it came, and what its partition looked like; the names of its lines,
    printable."""

    encoded: bytes
    cost_s: float
    at: float
    state: object
    fields: list[str]
    tasks: list[str]


def state_of(partition: PartitionOverview) -> object:
    """Changes whenever its counts do."""
    tasks = [(one.name, one.consumed, one.leased) for one in partition.tasks]
    return partition.rows, partition.cleared, partition.written, tasks


def cost_of(took_s: float, before: MapSeen | None) -> float:
    """What a map costs, by how long this one took: on a busy machine one takes many times that, and few take less. So
    a call that was slow counts for a quarter more than the one before at most, and one that was quick at once."""
    return took_s if before is None else min(took_s, GROWTH * before.cost_s)


def is_due(seen: MapSeen | None, partition: PartitionOverview, now: float) -> bool:
    """Whether to ask again."""
    if seen is None:
        return True
    pause_s = min(seen.cost_s / SHARE, LATEST_S)
    return now - seen.at >= (pause_s if seen.state != state_of(partition) else LATEST_S)
