"""What a call may leave that was interrupted or cancelled."""

from __future__ import annotations

import transfer_queue as tq


def opens_again(client: tq.TransferQueueClient) -> bool:
    """Whether the partition "p" of "series" is open for nobody: it is opened and cleared."""
    if tq.series_status("series")["waiting"]:
        return False
    tq.open_partition("p", "series", 0, timeout_s=5)
    assert list(tq.series_status("series")["open"]) == ["p"]
    client.clear_partition("p")
    return not tq.series_status("series")["open"]


def left(client: tq.TransferQueueClient) -> int:
    """How many rows of partition "p" the task "t" has not had."""
    _, status = client.get_consumption_status("t", "p")
    return 0 if status is None else int((status == 0).sum())
