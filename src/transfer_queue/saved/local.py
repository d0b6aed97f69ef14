"""A directory, which is written beside its place as `<dir>.tmp` and renamed.

One that is replaced is `<dir>.tq-old-5f0c9a21` for that moment, whole, and `<dir>.tq-gone-5f0c9a21` while it is
deleted. Whatever else lies beside it is not ours, nor is a `<dir>.tmp` without the lock of a writer. An interrupt may
strike as any call returns, and what it returned is lost: a lock is held by a file object, which ends then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import re
import secrets
import shutil
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

from transfer_queue.errors import CheckpointCorrupt, CheckpointMissing, InvalidInput
from transfer_queue.memory.memfd import make_directory, sync_directory
from transfer_queue.saved.files import listed_by
from transfer_queue.saved.folder import Draft, Folder
from transfer_queue.saved.full_disk import named_in_errors
from transfer_queue.saved.reading import BELOW

log = logging.getLogger("transfer_queue")
BUFFER_NBYTES = 1 << 20
NO_FILE = {errno.EISDIR, errno.ELOOP, errno.ENXIO}
GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
NAME_NBYTES = 255  # of a file at most (NAME_MAX)
DRAFT = ".tmp"
LOCK = ".tq-lock"  # the first file in a draft, the last one that goes; whoever writes there holds it
LOCK_BEFORE = ".lock"  # as older versions called it
OLD = ".tq-old-"
DELETED = ".tq-gone-"


class LocalFolder(Folder):
    """It holds a descriptor once a file of it was opened, so that all its files are those of one checkpoint."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._given = Path(directory)
        self._target = Path(os.path.realpath(directory))
        self._held: int | None = None

    def __str__(self) -> str:
        return str(self._given)

    def is_there(self) -> bool:
        return self._target.is_dir()

    def has(self, name: str) -> bool:
        try:
            os.stat(self._target / name if self._held is None else name, dir_fd=self._held)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return False
        return True

    def open(self, name: str) -> _LocalOpenFile:
        """Of the directory that was here when the first file was opened: another may have taken its place since."""
        try:
            held = self._hold()
            raw = io.FileIO(name, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK, dir_fd=held))
        except OSError as error:
            if error.errno in NO_FILE:
                raise CheckpointCorrupt(f"{self.path(name)} is no file") from None
            if error.errno not in GONE:
                raise
            raise CheckpointMissing(f"{self.path(name)} is missing") from None
        if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
            raw.close()
            raise CheckpointCorrupt(f"{self.path(name)} is no file")
        return _LocalOpenFile(raw)

    def _hold(self) -> int:
        if self._held is None:
            self._held = os.open(self._target, os.O_PATH | os.O_DIRECTORY)
            weakref.finalize(self, os.close, self._held)
        return self._held

    def refuse_other(self, name: str) -> None:
        target = self._target
        try:
            found = set(os.listdir(target))
            if name in found and (listed := listed_by((target / name).read_bytes())) is not None:
                found -= {name, LOCK, LOCK_BEFORE, *listed.files}
                found = {one for one in found if not BELOW.fullmatch(one)}  # it was written through a URL
        except FileNotFoundError:  # there is none, or another takes its place just now, and this is asked again then
            return
        except NotADirectoryError:
            if not os.path.lexists(target):  # what lies above it is none
                raise
            found = {target.name}
        if found:
            text = f"{target} holds something else than a checkpoint, which would be lost: {sorted(found)[:4]}"
            raise InvalidInput(f"{text}; move it away, or save to another directory")

    def refuse_any(self) -> None:
        refuse(self._target)

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[Draft]:
        _expect_short(self._target, f"{DELETED}{secrets.token_hex(4)}")
        draft = _LocalDraft(_beside(self._target))
        with named_in_errors(self._target, draft), _drafted(self._target) as path:
            yield draft
            draft.sync()
            self.refuse_other(name)
            old = _replace(path, self._target)
        _delete(old)

    @contextlib.contextmanager
    def creating(self, name: str) -> Iterator[Draft]:
        draft = _LocalDraft(_beside(self._target))
        with named_in_errors(self._target, draft), new_directory(self._target):
            yield draft
            draft.sync()

    def repair(self, name: str) -> None:
        """Only what was replaced is there, whole."""
        target = self._target
        if _replaced(target, name) is None:
            return
        with contextlib.ExitStack() as held:
            for lock in (LOCK, LOCK_BEFORE):
                with contextlib.suppress(OSError):  # somebody may be in the middle of it: between two renames
                    fcntl.flock(held.enter_context(open(_beside(target) / lock, "rb")), fcntl.LOCK_EX)
            found = _replaced(target, name)
            if found is None:
                return
            try:
                os.rename(found, target)
            except OSError:  # no lock is to be had where there is no draft
                if not target.exists():
                    raise


class _LocalOpenFile:
    def __init__(self, raw: io.FileIO) -> None:
        self._file = io.BufferedReader(raw, BUFFER_NBYTES)
        self.nbytes = os.fstat(raw.fileno()).st_size

    def readinto(self, into: memoryview) -> int:
        return self._file.readinto(into)

    def close(self) -> None:
        self._file.close()


class _LocalNewFile:
    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=BUFFER_NBYTES)  # noqa: SIM115 `finish` or `discard` closes it

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def finish(self) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def discard(self) -> None:
        self._file.close()


class _LocalDraft(Draft):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def sync(self) -> None:
        """The names in all directories are on the disk."""
        for directory, _, _ in os.walk(self._path):
            sync_directory(directory)

    def _create(self, name: str) -> _LocalNewFile:
        path = self._path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return _LocalNewFile(path)

    def _write_list(self, name: str, data: bytes) -> None:
        file = _LocalNewFile(self._path / name)
        file.write(data)
        file.finish()


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """An empty directory, which becomes `target` in the end, or vanishes on an error. Raises `FileExistsError`."""
    refuse(target)
    with _drafted(target) as path:
        yield path
        refuse(target)
        try:
            os.rename(path, target)
        finally:
            _unlock(target)
    sync_directory(target.parent)


def refuse(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists: what is there is never replaced")


@contextlib.contextmanager
def _drafted(target: Path) -> Iterator[Path]:
    """The empty directory `<dir>.tmp`, for this thread alone; it is gone in the end. What a killed process left there
    is removed. Raises `FileExistsError` when somebody else is saving there, and `InvalidInput` where it is no draft."""
    path = _beside(target)
    _expect_short(target, DRAFT)
    held: list[io.BufferedWriter] = []
    try:
        make_directory(path.parent)
        _lock(path, held)
        _empty(path)
        yield path
    except BaseException:
        with contextlib.suppress(OSError, InvalidInput):  # somebody else is saving there, or it is no draft
            if not held:
                _lock(path, held)
            _empty(path)
            shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        for one in held:
            one.close()


def _lock(path: Path, held: list[io.BufferedWriter]) -> None:
    """Make the directory `path`, and hold its lock."""
    while True:
        if _is_foreign(path):
            raise InvalidInput(
                f"{path} is no draft of a save, and would be lost: move it away, or save under another name"
            )
        path.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # whoever holds it goes on holding it
            os.replace(path / LOCK_BEFORE, path / LOCK)
        try:
            held.append(open(path / LOCK, "wb"))  # noqa: SIM115 `_drafted` closes it
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:  # it was renamed meanwhile
            continue
        except BlockingIOError:
            held.pop().close()
            raise FileExistsError(f"{path}: another process is saving there") from None
        except OSError as error:  # some network file systems do not lock
            log.warning("%s: cannot be locked against others that save there: %s", path, error)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path / LOCK), os.fstat(held[-1].fileno())):
                return
        held.pop().close()  # it is that of a directory that was renamed meanwhile


def _is_foreign(path: Path) -> bool:
    """Whether something lies there that is no draft: it would be lost."""
    try:
        found = os.listdir(path)
    except FileNotFoundError:
        return path.is_symlink()
    except NotADirectoryError:
        return True
    return path.is_symlink() or (bool(found) and not {LOCK, LOCK_BEFORE} & set(found))


def _empty(path: Path) -> None:
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            os.unlink(entry)


def _unlock(target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target / LOCK)


def _replace(draft: Path, target: Path) -> Path:
    """Returns where what was replaced is now, for a moment, if there was something."""
    old = target.with_name(f"{target.name}{OLD}{secrets.token_hex(4)}")
    for left in _left(target, DELETED):
        shutil.rmtree(left, ignore_errors=True)
    try:
        if target.exists():
            for left in _left(target, OLD):
                _delete(left)
            os.rename(target, old)
        os.rename(draft, target)
    except BaseException:
        if old.exists() and not target.exists():
            os.rename(old, target)
        raise
    finally:
        _unlock(target)
    sync_directory(target.parent)
    return old


def _beside(target: Path) -> Path:
    return target.with_name(target.name + DRAFT)


def _expect_short(target: Path, ending: str) -> None:
    """OSError where a file system does not take the name of `target` with this ending."""
    most = NAME_NBYTES - len(ending)
    if len(os.fsencode(target.name)) > most:
        text = f"{os.strerror(errno.ENAMETOOLONG)}: what is saved has a name of {most} bytes at most"
        raise OSError(errno.ENAMETOOLONG, text, str(target))


def _delete(old: Path) -> None:
    """Under another name: nobody takes a half of it for what was replaced."""
    deleted = Path(DELETED.join(str(old).rsplit(OLD, 1)))
    with contextlib.suppress(OSError):
        os.rename(old, deleted)
    try:
        shutil.rmtree(deleted, ignore_errors=True)
    except OSError as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # as a folder was closed: Python closes it again
            raise error.__context__ from None
        raise


def _replaced(target: Path, name: str) -> Path | None:
    """What was replaced last, where it is whole and nothing has taken its place."""
    if target.exists():
        return None
    found = _left(target, OLD)
    before, draft = target.with_name(target.name + ".old"), _beside(target)  # a backup of the user without this draft
    if (draft / LOCK_BEFORE).exists() and _is_whole(draft, name):
        found.insert(0, before)
    return next((one for one in reversed(found) if _is_whole(one, name)), None)


def _is_whole(path: Path, name: str) -> bool:
    """Whether the list `name` is there, and all files that it names."""
    try:
        listed = listed_by((path / name).read_bytes())
        return listed is not None and all(
            (path / listed.folder / one).stat().st_size == file.nbytes for one, file in listed.files.items()
        )
    except OSError:
        return False


def _left(target: Path, kind: str) -> list[Path]:
    """What was replaced and has yet to go, the last one last: one at most, but for what could not be deleted."""
    name = re.compile(re.escape(target.name + kind) + "[0-9a-f]{8}")
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for one in os.scandir(target.parent):
            if name.fullmatch(one.name):
                with contextlib.suppress(OSError):  # it went meanwhile
                    found.append((one.stat(follow_symlinks=False).st_mtime_ns, Path(one)))
    return [path for _, path in sorted(found)]
