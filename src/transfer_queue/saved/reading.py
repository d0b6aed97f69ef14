"""Reading what was saved: every byte is verified."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from xxhash import xxh3_128

from transfer_queue.errors import CheckpointCorrupt
from transfer_queue.saved.files import File, Metadata, decoded
from transfer_queue.saved.folder import Folder, OpenFile

CHUNK_NBYTES = 4 << 20
MAX_LIST_NBYTES = 1 << 30
BELOW = re.compile(r"(files-[0-9a-f-]{1,64}|)")  # nothing outside of the folder


class Reader:
    """A file that is read once, from its beginning to its end. `listed`: what the list says of it."""

    def __init__(self, source: OpenFile, listed: File, where: str) -> None:
        self.listed, self.where = listed, where
        self._source = source
        self._digest = xxh3_128()
        self._num_read = 0

    def skip(self, nbytes: int) -> None:
        self.fill(memoryview(bytearray(nbytes)))

    def fill(self, into: memoryview) -> None:
        """Fill `into` with the bytes that come next. `CheckpointCorrupt` when the file ends before."""
        for start in range(0, len(into), CHUNK_NBYTES):
            part = into[start : start + CHUNK_NBYTES]
            if self._source.readinto(part) != len(part):
                raise CheckpointCorrupt(f"{self.where}: the file ends too early")
            self._digest.update(part)
        self._num_read += len(into)

    def check(self) -> None:
        """`CheckpointCorrupt` unless all was read, and is what was written."""
        if self._num_read != self.listed.nbytes or self._digest.hexdigest() != self.listed.xxh3_128:
            raise CheckpointCorrupt(f"{self.where} is damaged: its digest does not match")


class SavedFolder:
    """What was saved with the list `name`. Raises `CheckpointMissing`, `CheckpointCorrupt`, `CheckpointUnsupported`;
    the list itself is verified here."""

    def __init__(self, folder: Folder, name: str, expected_format: int) -> None:
        self.folder = folder
        where = folder.path(name)
        source = folder.open(name)
        try:
            if source.nbytes > MAX_LIST_NBYTES:
                raise CheckpointCorrupt(f"{where} has {source.nbytes} bytes: it is no list of files")
            data = bytearray(source.nbytes)
            if source.readinto(memoryview(data)) != len(data):
                raise CheckpointCorrupt(f"{where}: the file ends too early")
        finally:
            source.close()
        self.metadata: Metadata = decoded(bytes(data), where, expected_format)
        if not BELOW.fullmatch(self.metadata.folder):
            raise CheckpointCorrupt(f"{where} is damaged: files below {self.metadata.folder!r}")

    def path(self, name: str) -> str:
        return self.folder.path(self._at(name))

    def has(self, name: str) -> bool:
        return self.folder.has(self._at(name))

    @contextmanager
    def opened(self, name: str) -> Iterator[Reader]:
        """A file whose size is what the list says."""
        listed, where = self.metadata.files.get(name.rpartition("/")[2]), self.path(name)
        source = self.folder.open(self._at(name))
        try:
            if listed is None or listed.nbytes != source.nbytes:
                raise CheckpointCorrupt(f"{where} has {source.nbytes} bytes, saved were {listed and listed.nbytes}")
            yield Reader(source, listed, where)
        finally:
            source.close()

    def content(self, name: str) -> bytes:
        """All of a file."""
        with self.opened(name) as file:
            data = bytearray(file.listed.nbytes)
            file.fill(memoryview(data))
            file.check()
        return bytes(data)

    def _at(self, name: str) -> str:
        below = self.metadata.folder
        return f"{below}/{name}" if below else name
