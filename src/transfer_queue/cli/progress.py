"""Bars on long work, where a person sits before a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def bar(what: str, directory: Path | None = None, nbytes: int = 0) -> Iterator[None]:
    """Say on a terminal's stderr how long `what` takes; and how much of about `nbytes` lies in `directory` so far."""
    if not _is_watched():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn, TimeElapsedColumn

    class WrittenColumn(BarColumn):
        """Looks at the files whenever it is drawn: the work itself tells nobody how far it is."""

        def render(self, task: Task) -> object:  # type: ignore[override]
            if directory is not None:
                task.completed = float(min(nbytes, written(directory)))
            return super().render(task)

    columns = [TextColumn("{task.description}", markup=False), WrittenColumn(), TimeElapsedColumn()]
    if nbytes:
        columns.insert(2, DownloadColumn(binary_units=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        shown.add_task(what, total=nbytes or None)
        yield


@contextlib.contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """For work that says itself how much is done, and of how much; None where nobody sits before a terminal."""
    if not _is_watched():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _is_watched() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def written(directory: Path) -> int:
    """The bytes of the files of a directory; 0 where there is none."""
    with contextlib.suppress(OSError):
        return sum(entry.stat().st_size for entry in os.scandir(directory))
    return 0
