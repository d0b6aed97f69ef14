"""What is asked of a service as a whole."""

from __future__ import annotations

from typing import Any

from transfer_queue.wire.messages.base import Reply, Request


class Stats(Request):
    pass


class Stop(Request):
    """End the server; refused unless sent by its owner's session or a local peer with the same user."""


class Report(Reply):
    values: dict[str, Any]
