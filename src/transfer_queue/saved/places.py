"""Where a folder lies."""

from __future__ import annotations

import os

from transfer_queue.saved.folder import Folder
from transfer_queue.saved.local import LocalFolder
from transfer_queue.saved.remote import RemoteFolder


def folder_at(place: str | os.PathLike[str]) -> Folder:
    """A directory of this machine, or what a URL with `://` leads to. `ConfigError` where fsspec opens no such URL."""
    text = os.fspath(place)
    return RemoteFolder(text) if "://" in text else LocalFolder(place)
