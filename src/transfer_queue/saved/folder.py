"""A folder of files, wherever it lies, and the draft of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from xxhash import xxh3_128

from transfer_queue.saved.files import NO_DIGEST, File, Metadata, encoded


class NewFile(Protocol):
    """A new file."""

    def write(self, data: bytes | memoryview) -> None: ...
    def finish(self) -> None:
        """Return once all of it is on its disk, or in its store."""

    def discard(self) -> None:
        """It is not wanted any more."""


class OpenFile(Protocol):
    """A file that is read from its beginning."""

    nbytes: int

    def readinto(self, into: memoryview) -> int:
        """Fill `into`; fewer bytes only where the file ends."""

    def close(self) -> None: ...


class Output:
    """A new file whose size and digest are known at its end."""

    def __init__(self, file: NewFile) -> None:
        self.nbytes = 0
        self._file = file
        self._digest = xxh3_128()

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.nbytes += len(data)

    def finish(self) -> File:
        self._file.finish()
        return File(self.nbytes, self._digest.hexdigest())


class Draft(ABC):
    """Files that nobody sees yet; `files` lists those that are written to their end, by the last part of their name.
    `below`: the name in the folder below which they lie. `expected_nbytes`: about how many they will have in all, where
    that is known (0: it is not)."""

    def __init__(self, below: str = "") -> None:
        self.files: dict[str, File] = {}
        self.below = below
        self.expected_nbytes = 0

    @contextmanager
    def output(self, name: str) -> Iterator[Output]:
        file = self._create(name)
        try:
            out = Output(file)
            yield out
            self.files[name.rpartition("/")[2]] = out.finish()
        except BaseException:
            file.discard()
            raise

    def seal(self, name: str, number: int, user_metadata: dict[str, Any]) -> None:
        """Write the list of all files, as `name`, of format `number`; nothing is written after it."""
        self._write_list(name, encoded(Metadata(NO_DIGEST, number, True, user_metadata, self.files, self.below)))

    @abstractmethod
    def _create(self, name: str) -> NewFile: ...

    @abstractmethod
    def _write_list(self, name: str, data: bytes) -> None: ...


class Folder(ABC):
    """`str` of it is what it was opened as. Files are named from there, with slashes."""

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def is_there(self) -> bool: ...

    @abstractmethod
    def has(self, name: str) -> bool: ...

    @abstractmethod
    def open(self, name: str) -> OpenFile:
        """`CheckpointMissing`."""

    @abstractmethod
    def repair(self, name: str) -> None:
        """Undo a replacement that was interrupted; `name` is that of the list."""

    @abstractmethod
    def refuse_other(self, name: str) -> None:
        """`InvalidInput` where something else lies here than a folder with the list `name`."""

    @abstractmethod
    def refuse_any(self) -> None:
        """`FileExistsError` where anything lies here."""

    @abstractmethod
    def replacing(self, name: str) -> AbstractContextManager[Draft]:
        """What is written takes the place of what is here in the end, or vanishes on an error; its list is `name`.
        `FileExistsError` where somebody else is doing so."""

    @abstractmethod
    def creating(self, name: str) -> AbstractContextManager[Draft]:
        """As `replacing`, where nothing is; `FileExistsError`."""

    def path(self, name: str) -> str:
        """What a file is called in errors."""
        return f"{str(self).rstrip('/')}/{name}"
