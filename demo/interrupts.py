"""Ctrl-C and SIGTERM as something to be asked about, so that nothing is torn in the middle."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_ASKING_TO_END = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context, for the main thread. Within it nobody is interrupted: who can end in good order asks."""

    def __init__(self) -> None:
        self.came = False
        """Whether somebody has asked to end."""

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._note) for number in _ASKING_TO_END}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
