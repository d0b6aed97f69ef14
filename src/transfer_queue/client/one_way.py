"""What a session told servers that answer nothing to it: a server that is killed may not have read it."""

from __future__ import annotations

from collections import deque

from transfer_queue.wire import messages as m

REMEMBERED = 256  # of each kind, for each server


class OneWay:
    """To say it twice does no harm. One thing would: a forked child has several pins of one block under no request, so
    that a release which is said twice may end two of them. Those are not said again."""

    def __init__(self) -> None:
        self.confirmed: deque[int] = deque(maxlen=REMEMBERED)  # answers that were received
        self.missed: set[str] = set()  # servers that something could not be said to
        self._said: dict[str, deque[m.Message]] = {}

    def said(self, message: m.Message, to: str) -> None:
        if isinstance(message, (m.Discard, m.Cancel)) or (isinstance(message, m.Unpin) and message.rid > 0):
            self._said.setdefault(to, deque(maxlen=REMEMBERED)).append(message)

    def catch_up(self, to: str) -> list[tuple[m.Message, str]]:
        """What to say to a server that has just answered, where something could not be said to it."""
        if to not in self.missed:
            return []
        self.missed.discard(to)
        return self.again(to)

    def again(self, to: str) -> list[tuple[m.Message, str]]:
        """What to say to a server once more whose connections were lost."""
        again: list[tuple[m.Message, str]] = [(message, to) for message in self._said.get(to, ())]
        if self.confirmed and not to:
            again.append((m.Received(list(self.confirmed)), to))
        return again
