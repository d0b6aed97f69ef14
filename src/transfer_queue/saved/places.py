"""Where a folder lies."""

from __future__ import annotations

import os

from transfer_queue.errors import InvalidInput
from transfer_queue.saved.folder import Folder
from transfer_queue.saved.local import LocalFolder
from transfer_queue.saved.remote import RemoteFolder


def folder_at(place: str | os.PathLike[str]) -> Folder:
    """A directory of this machine, or what a URL with `://` leads to. `ConfigError` where fsspec opens no such URL, and
    `InvalidInput` for one that went through pathlib, which takes away a slash."""
    text = os.fspath(place)
    if text.partition("/")[0].endswith(":") and "://" not in text:
        raise InvalidInput(f"{text!r} is no directory, and a URL with a slash too few: give URLs as strings")
    return RemoteFolder(text) if "://" in text else LocalFolder(place)
