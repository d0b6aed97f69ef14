"""How a standby is forked."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import warnings
from types import SimpleNamespace
from typing import Any, NoReturn

from transfer_queue.server.standby.keeper import END_SIGNALS, StandbyKeeper, _fork
from transfer_queue.server.standby.recording import Recorder


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


def test_a_standby_that_cannot_take_over_is_none() -> None:
    """As while a checkpoint is loaded: who looks for the one that takes over must not find it."""

    def never() -> NoReturn:
        raise AssertionError("nobody takes over")

    async def look() -> list[int]:
        unit = SimpleNamespace(shm=SimpleNamespace(arenas=[]))
        service: Any = SimpleNamespace(standby_pid=0, controller=SimpleNamespace(unfinished=False), unit=unit)
        recorder = Recorder()
        keeper = StandbyKeeper(service, recorder, lambda: (), never)
        keeper.renew()
        first = service.standby_pid
        recorder.leave_out()
        found = [first, service.standby_pid]
        while not service.standby_pid:
            await asyncio.sleep(0)
        found.append(service.standby_pid)
        while os.path.exists(f"/proc/{first}"):  # the keeper hears of its end
            await asyncio.sleep(0)
        keeper.close()
        return found

    first, meanwhile, later = asyncio.run(look())
    assert first
    assert not meanwhile
    assert later not in (0, first)
