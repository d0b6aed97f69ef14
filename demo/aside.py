"""Calls that their maker does not wait for: on busy processors every wait costs a turn of some other process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Aside:
    """Makes calls in a thread of its own, one after the other, in the order in which it is given them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aside")
        self._calls: deque[Future[Any]] = deque()

    def call(self, function: Callable[..., Any], *args: Any, **named: Any) -> None:
        """Returns at once. Raises what an earlier call raised; this one is not made then."""
        while self._calls and self._calls[0].done():
            self._calls.popleft().result()
        self._calls.append(self._thread.submit(function, *args, **named))

    def catch_up(self) -> None:
        """Wait until all calls are made. Raises what the first one raised that failed."""
        while self._calls:
            self._calls.popleft().result()
