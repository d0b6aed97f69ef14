"""How a standby is forked."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from types import SimpleNamespace
from typing import Any

from transfer_queue.server.standby.keeper import END_SIGNALS, _fork


def test_a_signal_that_comes_as_a_standby_is_forked_waits_until_it_is_looked_for() -> None:
    ours, theirs = os.pipe()

    def stand_by(*_: object) -> None:
        os.write(theirs, repr(set(END_SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())).encode())

    pids: list[Any] = []
    keeper: Any = SimpleNamespace(stand_by=stand_by)
    nothing: Any = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        forking = threading.Thread(target=lambda: pids.append(_fork(keeper, nothing, nothing)))
        forking.start()
        forking.join()
    os.waitpid(pids[0], 0)
    assert os.read(ours, 9) == b"True"
    assert not set(END_SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    os.close(ours), os.close(theirs)
