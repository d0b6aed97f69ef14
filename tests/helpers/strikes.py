"""Interrupts from the keyboard at every place of a call where the interpreter looks for one, one place after the other.

CPython looks as a function in Python begins, and as one in C has returned, whose result is then lost. Its logging and
its imports are left out: struck there they keep a lock for good, and all who log or import stand still.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from conftest import until

from transfer_queue import background_call

UNCLEAN = [  # what interrupts leave to Python, for tests that strike
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of connections that are left to the collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # struck as a generator is closed
]
LEFT_OUT = (logging.__file__, "<frozen importlib", __file__)
MOST = 5000


class Strike(NamedTuple):
    """`place`: the function that had begun or had returned. `result` is that of a call that nothing struck."""

    place: str
    result: Any = None


def strikes(action: Callable[[], Any], *left_out: str, only: str = "", step: int = 1) -> Iterator[Strike]:
    """Call `action` again and again, and strike `step` places later each time; the last time nothing strikes, and
    `place` is "". Places are in files with `only` in their paths, and in none that is `left_out`.

    What the interrupt ends must be as if it had not begun, or be whole: look after each. The collector rests meanwhile:
    what it calls comes at another place each time, and swallows interrupts.
    """
    for number in range(0, MOST, step):
        place: list[str] = []
        begun = 0

        def look(frame: Any, event: str, function: Any, number: int = number, place: list[str] = place) -> None:
            nonlocal begun
            file = frame.f_code.co_filename
            if event not in ("call", "c_return") or only not in file or file.startswith((*LEFT_OUT, *left_out)):
                return
            begun += 1
            if begun > number:
                sys.setprofile(None)
                place.append(
                    f"{event} {getattr(function, '__qualname__', frame.f_code.co_name)} in {frame.f_code.co_name}"
                )
                raise KeyboardInterrupt

        result = None
        with contextlib.suppress(KeyboardInterrupt):
            result = _profiled(action, look)
        yield Strike(place[0] if place else "", result)  # the interrupt, and what it held, is gone
        if not place:
            return
    raise AssertionError(f"more than {MOST} places")


def every(action: Callable[[], Any], is_clean: Callable[[], bool], *left_out: str, step: int = 1) -> Iterator[str]:
    """Strike `action` at every place, and look after each whether nothing is left of it. Gives the places; torch
    swallows interrupts at a few, and what got through ends the run: its result is in its asker's hands."""
    for strike in strikes(action, *left_out, step=step):
        if strike.result is None:
            gc.collect(0)
            until(is_clean, f"the end of a call that was struck at {strike.place!r}", 10)
        yield strike.place
        if strike.result is not None:
            return


def _profiled(action: Callable[[], Any], look: Any) -> Any:
    gc.disable()
    sys.setprofile(look)
    try:
        return action()
    finally:
        sys.setprofile(None)
        gc.enable()


def struck_as_it_waits(action: Callable[[], Any], what: str) -> None:
    """Interrupt `action`, of the main thread, with a real signal as it waits for the thread called `what`."""
    main = threading.main_thread().ident
    assert main is not None

    acts: list[bool] = []

    def act() -> None:
        acts.append(True)
        action()

    def waits() -> bool:
        frames = sys._current_frames()
        others = [frames.get(one.ident or 0) for one in threading.enumerate() if one.name == what]
        stacks = [traceback.walk_stack(one) for one in others if one is not None]
        files = [frame.f_code.co_filename for stack in stacks for frame, _ in stack]
        is_begun = any(file != threading.__file__ for file in files)
        return (
            bool(acts)
            and is_begun
            and frames[main].f_code.co_filename in (threading.__file__, background_call.__file__)
        )

    def strike() -> None:
        until(waits, "the main thread waits")
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest ignore it
    striker = threading.Thread(target=strike)
    striker.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            act()
        striker.join()
    finally:
        signal.signal(signal.SIGINT, before)
