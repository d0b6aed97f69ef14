"""Where a folder lies."""

from __future__ import annotations

import os

from transfer_queue.errors import InvalidInput, UnsupportedValue
from transfer_queue.saved.folder import Folder
from transfer_queue.saved.local import LocalFolder
from transfer_queue.saved.remote import RemoteFolder


def folder_at(place: str | os.PathLike[str]) -> Folder:
    """A directory of this machine, or what a URL leads to. `InvalidInput`: see `is_url`. `ConfigError` where fsspec
    opens no such URL."""
    return RemoteFolder(os.fspath(place)) if is_url(place) else LocalFolder(place)


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether it is a URL with `://`. `InvalidInput` for one that went through pathlib, which takes away a slash, and
    `UnsupportedValue` (a TypeError) for what is no path."""
    try:
        text = os.fspath(place)
        if isinstance(text, str):
            os.fsencode(text)
    except TypeError:
        raise UnsupportedValue(f"a directory is a string or a path, got {place!r:.200}") from None
    except UnicodeEncodeError:
        raise InvalidInput(f"no directory can have the name {place!r:.200}") from None
    if not isinstance(text, str):
        raise UnsupportedValue(f"a directory is a string or a path, got {place!r:.200}")
    if text.partition("/")[0].endswith(":") and "://" not in text:
        raise InvalidInput(f"{text!r} is no directory, and a URL with a slash too few: give URLs as strings")
    return "://" in text
