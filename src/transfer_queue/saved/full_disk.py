"""What a file system without room says, with the place and what to do: by itself it names neither."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from transfer_queue.saved.filesystem import FULL
from transfer_queue.saved.folder import Draft


@contextlib.contextmanager
def named_in_errors(place: Path, draft: Draft | None = None) -> Iterator[None]:
    """Where room is missing for what is written within, which is for `place` and gone after an error, the OSError says
    where, how much there is, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or type(error) is not OSError:
            raise
        nbytes = 0 if draft is None else draft.expected_nbytes
        text = f"{os.strerror(error.errno)}{_explained(error.errno, place, nbytes)}"
        raise OSError(error.errno, text, str(place)) from error


def _explained(number: int, place: Path, nbytes: int) -> str:
    wanted = f" ({nbytes} bytes are needed)" if nbytes else ""
    if number == errno.EFBIG:
        return f"{wanted}: a file may not become so large there (`ulimit -f`); raise that limit, or write elsewhere"
    if number == errno.EDQUOT:
        return f"{wanted}: remove some of your files there, or write elsewhere"
    with contextlib.suppress(OSError):
        found = os.statvfs(place.parent)
        wanted = f" ({nbytes or 'more'} bytes are needed, {found.f_bavail * found.f_frsize} are free)"
    return f"{wanted}: make room there, or write elsewhere"
