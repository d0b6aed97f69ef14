"""A worker process ends when the process that started it ends, whatever the worker waits for.

Other signs are not enough: a worker that waits in a queue never sees its end, because its forked siblings hold the
other end of the pipe as well, and so it is with the sentinel of `multiprocessing.parent_process()`.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import threading
from multiprocessing.process import BaseProcess

_watching = 0  # the process whose parent is watched; a forked child has none of its parent's threads


def end_with_parent() -> None:
    """From now on this process ends together with its parent: at once where that is gone already.

    Does nothing in a process that multiprocessing did not start.
    """
    global _watching
    parent = multiprocessing.parent_process()
    if parent is None or _watching == os.getpid():
        return
    assert parent.pid is not None
    try:
        watch = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        os._exit(1)
    if _is_gone(parent):  # it was before the watch began, and another process has its number
        os._exit(1)
    _watching = os.getpid()
    threading.Thread(target=_wait, args=(watch,), name="tq-parent", daemon=True).start()


def _is_gone(parent: BaseProcess) -> bool:
    """A process that was started through a fork server is a child of that; its sentinel has no other holders."""
    return os.getppid() != parent.pid and not parent.is_alive()


def _wait(watch: int) -> None:
    """The descriptor of a process becomes readable when it ends (pidfd_open(2))."""
    ended = select.poll()
    ended.register(watch, select.POLLIN)
    ended.poll()
    os._exit(1)
