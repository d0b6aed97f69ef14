"""No garbage collection while many values are made at once: all of them live, so it would look through them in vain.

A full collection takes 0.2 s in a process that has imported torch, and Python begins one after making enough lists and
dicts, whether or not any was dropped.
"""

from __future__ import annotations

import gc
import os
import threading


class CollectorPause:
    """A context in which this process collects no garbage by itself; contexts of several threads may overlap.

    A collector that is off stays off. Whoever calls `gc.enable` or `gc.disable` within decides until the last one ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._was_on = gc.isenabled()
                gc.disable()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth and self._was_on:
                gc.enable()

    def forked(self) -> None:
        """In a child, whose parent's threads are not here to end what they began."""
        self._lock = threading.Lock()
        if self._depth and self._was_on:
            gc.enable()
        self._depth = 0


collector_pause = CollectorPause()
os.register_at_fork(after_in_child=collector_pause.forked)
