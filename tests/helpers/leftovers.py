"""What a call may leave that was interrupted or cancelled."""

from __future__ import annotations

import transfer_queue as tq


def left(client: tq.TransferQueueClient) -> int:
    """How many rows of partition "p" the task "t" has not had."""
    _, status = client.get_consumption_status("t", "p")
    return 0 if status is None else int((status == 0).sum())
