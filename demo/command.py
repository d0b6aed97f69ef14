"""A whole run: starts the service and the workers, watches, and tells how it went."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console

import transfer_queue as tq
from demo import report
from demo.board import Board
from demo.fleet import WorkerFailed
from demo.interrupts import Interrupts
from demo.settings import Settings
from demo.supervisor import Supervisor
from demo.view import View
from transfer_queue.errors import ServiceUnavailable
from transfer_queue.page.beside import beside

_REFRESH_S = 0.25
INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended


def run(settings: Settings, interrupts: Interrupts) -> int:
    """Returns the exit code: 0, 1 for a worker that failed, 130 after an interrupt. The service and all workers have
    ended in any case. What there is to show is shown after an interrupt, too.
    """
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=settings.samples_per_prompt, group_tag="group_id")
    try:
        tq.init({"controller": {"sampler": sampler}})
        board = Board(settings)
        with _page(settings):
            _watch(settings, board, interrupts)
        print(report.summary(board))
        print(f"curves and timeline: {report.draw(board, settings.folder / 'run.png')}")
    except (WorkerFailed, ServiceUnavailable) as failure:
        print(failure, file=sys.stderr)
        return 1
    finally:
        tq.close()
    if interrupts.came:
        print("interrupted: every process has been ended", file=sys.stderr)
        return INTERRUPTED
    return 0


def _page(settings: Settings) -> AbstractContextManager[object]:
    """A page in a browser for as long as the run lasts, where it is wanted; it prints where."""
    address = tq.address()
    if settings.page_port is None or address is None:
        return nullcontext()
    return beside(str(address), settings.page_port)


def _watch(settings: Settings, board: Board, interrupts: Interrupts) -> None:
    """Start every worker and watch until all are done, or somebody asks to end.

    Raises `WorkerFailed`; no worker is left in any case.
    """
    drawn_s = 0.0
    with Supervisor(settings, board) as supervisor, View(Console()) as view:
        supervisor.start()
        done = False
        while not (done or interrupts.came):
            # Wakes at once when a worker ends; the timeout is how often the picture is drawn anew.
            try:
                done = supervisor.watch(_REFRESH_S)
            except WorkerFailed:
                if not interrupts.came:  # otherwise it was asked to end, too
                    raise
                break
            if done or time.monotonic() - drawn_s >= _REFRESH_S / 2:
                board.refresh()
                view.show(board)
                drawn_s = time.monotonic()
    board.refresh()
