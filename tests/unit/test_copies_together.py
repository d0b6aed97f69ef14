"""Work that is shared between threads ends before its caller goes on, whatever happens."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from transfer_queue.memory.copy import Mover


def test_an_interrupt_waits_for_the_other_threads() -> None:
    mover, begun, interrupted, ended = Mover(2), threading.Event(), threading.Event(), threading.Event()

    def interrupt(*given: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def mine() -> None:
        assert begun.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    def other() -> None:
        begun.set()
        assert interrupted.wait(20)
        ended.set()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            mover.together([mine, other])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()
    mover.close()


def test_what_one_raises_waits_for_the_others() -> None:
    mover, ended = Mover(2), threading.Event()
    with pytest.raises(ZeroDivisionError):
        mover.together([lambda: 1 // 0, lambda: ended.set()])  # type: ignore[list-item]
    assert ended.is_set()
    with pytest.raises(ZeroDivisionError):
        mover.together([lambda: None, lambda: 1 // 0])  # type: ignore[list-item]
    mover.close()
