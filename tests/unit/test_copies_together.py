"""Work that is shared between threads ends before its caller goes on, whatever happens."""

from __future__ import annotations

import os
import signal
import threading
import weakref

import numpy as np
import pytest

from transfer_queue.memory.copy import DIRECT_NBYTES, Copies, Mover


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


def test_what_was_made_for_a_copy_alone_lives_until_it_is_copied() -> None:
    copies, into = Copies(Mover(1)), np.zeros(DIRECT_NBYTES, np.uint8)
    source = np.full(DIRECT_NBYTES, 7, np.uint8)
    left = weakref.ref(source)
    copies.copy(into, source)
    del source
    assert left() is not None
    copies.run()
    assert (into == 7).all()
    assert left() is None
