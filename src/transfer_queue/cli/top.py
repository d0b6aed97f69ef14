"""`tq top`: what happens in a service now, on a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from transfer_queue.cli.attaching import Address, AsJson, chosen, opened
from transfer_queue.cli.frames import frame
from transfer_queue.cli.observing import Bell, Observer, Sight
from transfer_queue.cli.tables import console, plain, print_json
from transfer_queue.errors import InvalidInput, ServiceUnavailable

REDRAW_S = 1.0  # a window may have another size
WIDTH, HEIGHT = 120, 60  # of a frame that goes into a pipe


def top(
    once: Annotated[bool, typer.Option("--once", help="One frame, of a second; then end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """What happens now, once a second, until q or Ctrl-C.

    Rows that are written and used, who waits for what and what each lacks, memory, weights. It goes on while the
    service is stopped, gone or started anew, and says so. --json prints a line for each look.
    """

    def place() -> str:
        return chosen(address)

    place()  # where nothing is meant, nothing is waited for
    if once:
        opened(address).close()  # or the error says what to do
        _print_once(place, interval, as_json)
    elif as_json:
        with contextlib.suppress(KeyboardInterrupt):
            _print_lines(place, interval)
    elif not (sys.stdout.isatty() and sys.stdin.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        raise InvalidInput("tq top draws on a terminal, and this is none: --once prints one frame, --json lines")
    else:
        with contextlib.suppress(KeyboardInterrupt):
            _draw(place, interval)


def _print_once(place: Any, interval: float, as_json: bool) -> None:
    """A frame with the rates of one interval. Raises `ServiceUnavailable` where there is nothing to see."""
    with Bell() as bell, Observer(place, interval, bell.ring) as observer:
        last = observer.sight()
        while last.rates is None and not last.trouble:
            select.select([bell.fileno()], [], [], REDRAW_S)
            bell.hush()
            last = observer.sight()
    if last.trouble:
        raise ServiceUnavailable(f"{last.trouble}{f', at {last.address}' if last.address else ''}")
    if as_json:
        print_json(told(last))
        return
    out = console()
    width, height = (out.width, out.height) if sys.stdout.isatty() else (WIDTH, HEIGHT)
    print("\n".join(line.plain for line in frame(last, width, height)[:-1]).rstrip())


def _print_lines(place: Any, interval: float) -> None:
    """A line for each look, and each second in which there is trouble."""
    with Bell() as bell, Observer(place, interval, bell.ring) as observer:
        while True:
            news, _, _ = select.select([bell.fileno()], [], [], REDRAW_S)
            bell.hush()
            sight = observer.sight()
            if news or sight.trouble:
                print_json(told(sight))
                sys.stdout.flush()


def told(sight: Sight) -> dict[str, Any]:
    """A sight as JSON has it. Rates by partition and then by field or task, in rows a second."""
    by_partition: dict[str, dict[str, dict[str, float]]] = {"written": {}, "consumed": {}}
    if sight.rates is not None:
        for what, counts in (("written", sight.rates.written), ("consumed", sight.rates.consumed)):
            for (partition, name), rate in counts.items():
                by_partition[what].setdefault(partition, {})[name] = rate
    rates = None if sight.rates is None else {"requests": sight.rates.requests, **by_partition}
    return {
        "address": sight.address, "trouble": sight.trouble, "silent_s": sight.silent_s, "note": sight.note,
        "rates": rates, "overview": plain(sight.overview),
    }  # fmt: skip


# on a terminal


def _draw(place: Any, interval: float) -> None:
    """Until q is pressed."""
    from rich.console import Group
    from rich.live import Live

    out = console()
    with (
        Bell() as bell, keys() as keyboard, Live(console=out, screen=True, auto_refresh=False) as live,
        Observer(place, interval, bell.ring) as observer,
    ):  # fmt: skip
        while True:
            live.update(Group(*frame(observer.sight(), out.width, out.height)), refresh=True)
            ready, _, _ = select.select([bell.fileno(), keyboard], [], [], REDRAW_S)
            if keyboard in ready and is_end(os.read(keyboard, 64)):
                return
            bell.hush()


def is_end(typed: bytes) -> bool:
    """Whether somebody wants to leave: q, Ctrl-C, Ctrl-D; nothing: the terminal is gone."""
    return not typed or not {b"q", b"Q", b"\x03", b"\x04"}.isdisjoint(bytes([one]) for one in typed)


@contextlib.contextmanager
def keys() -> Iterator[int]:
    """Standard input, key by key and without an echo. Also SIGTERM leaves the terminal as it was."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        tty.setcbreak(number)
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, previous)
