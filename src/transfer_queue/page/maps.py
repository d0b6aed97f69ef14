"""How often the map of a partition may be asked for: its cost grows with rows times fields."""

from __future__ import annotations

from typing import NamedTuple

from transfer_queue.wire.messages.overview import PartitionOverview

MAX_RUNS = 512
SHARE = 0.006  # of one core of the server, while the partition changes
LATEST_S = 10.0  # rows may be cleared and others come while all counts stay


class MapSeen(NamedTuple):
    """A map as JSON, how long it took, when it came, and what its partition looked like. `number`: of the look."""

    encoded: bytes
    took_s: float
    at: float
    state: object
    number: int


def state_of(partition: PartitionOverview) -> object:
    """Changes whenever its counts do."""
    tasks = [(one.name, one.consumed, one.leased) for one in partition.tasks]
    return partition.rows, partition.written, tasks


def is_due(seen: MapSeen | None, partition: PartitionOverview, now: float) -> bool:
    """Whether to ask again. A call that was slow once, on a busy machine, says little of what the next one costs: so no
    map is older than `LATEST_S`."""
    if seen is None:
        return True
    pause_s = min(seen.took_s / SHARE, LATEST_S)
    return now - seen.at >= (pause_s if seen.state != state_of(partition) else LATEST_S)
