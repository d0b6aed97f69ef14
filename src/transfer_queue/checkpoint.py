"""Checkpoints: the directory they lie in, and that it is always a whole and verified one.

    metadata.json       format, the user's metadata, size and xxh3-128 digest of every other file, and its own digest
    controller.msgpack  the controller's state; opaque here
    blocks.msgpack      `Index`: where every block lies, its layout and digest
    blocks-00000.bin    blocks one after the other, 64-byte aligned; the next file begins where one has reached 1 GiB

A checkpoint is written beside its place as `<dir>.tmp` and swapped in; the earlier one is `<dir>.old` for that moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from xxhash import xxh3_128, xxh3_128_digest, xxh3_128_hexdigest

from transfer_queue.client.session import Session
from transfer_queue.client.transfer.snapshots import CHUNK_NBYTES, PinnedSnapshot, Refill, refill, snapshot
from transfer_queue.codec.layout import ALIGN
from transfer_queue.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    CheckpointUnsupported,
    InvalidInput,
    UnsupportedValue,
)
from transfer_queue.memory.memfd import sync_directory
from transfer_queue.structs import decodable

log = logging.getLogger("transfer_queue")

FORMAT = 1
METADATA, CONTROLLER, INDEX, BLOCKS = "metadata.json", "controller.msgpack", "blocks.msgpack", "blocks-{:05d}.bin"
PICKLED = "controller_state.pkl"  # what TransferQueue 0.1.11 writes
FILE_NBYTES = 1 << 30
BUFFER_NBYTES = 1 << 20
NO_DIGEST = "0" * 32
Reader: TypeAlias = "io.BufferedReader[io.FileIO]"


class File(msgspec.Struct):
    nbytes: int
    xxh3_128: str


@decodable
class Metadata(msgspec.Struct):
    """metadata.json. `digest` is that of the file itself with zeros in place of the digest."""

    digest: str
    format: int
    storage_saved: bool
    user_metadata: dict[str, Any]
    files: dict[str, File]


class StoredBlock(msgspec.Struct, array_like=True, gc=False):
    """Where a block lies: `file` is the number of a blocks file, `layout` one of the index's."""

    block: int
    file: int
    offset: int
    nbytes: int
    layout: int
    digest: bytes


@decodable
class Index(msgspec.Struct):
    format: int
    num_files: int
    layouts: list[bytes]
    blocks: list[StoredBlock]


# saving


def save(
    session: Session,
    directory: str | os.PathLike[str],
    include_storage: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """See `transfer_queue.save_checkpoint`."""
    try:
        user: dict[str, Any] = json.loads(json.dumps(dict(metadata or {})))
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedValue(f"metadata is not JSON: {error}") from None
    if not include_storage:
        log.warning("include_storage=False has no effect: rows live in memory and would be lost, so they are saved")
    target = Path(os.path.realpath(directory))
    _repair(target)
    if os.path.lexists(target) and not (target / METADATA).exists() and (not target.is_dir() or os.listdir(target)):
        raise InvalidInput(f"{target} holds something else than a checkpoint, which would be lost")
    with _draft(target) as draft, snapshot(session) as found:
        files = _write(draft, found)
        with _Output(draft / METADATA, {}) as out:
            out.write(_metadata_bytes(Metadata(NO_DIGEST, FORMAT, True, user, files)))


def _write(draft: Path, found: PinnedSnapshot) -> dict[str, File]:
    """Write state and blocks; returns the files. Pins end with the file that holds their block."""
    files: dict[str, File] = {}
    with _Output(draft / CONTROLLER, files) as out:
        out.write(found.state)
    index = Index(FORMAT, 0, found.layouts, [])
    blocks = found.blocks()
    held = next(blocks, None)
    while held is not None:
        first = len(index.blocks)
        with _Output(draft / BLOCKS.format(index.num_files), files) as out:
            while held is not None and out.nbytes < FILE_NBYTES:
                piece, chunks = held
                out.write(bytes(-out.nbytes % ALIGN))
                start, digest = out.nbytes, xxh3_128()
                for chunk in chunks:
                    out.write(chunk)
                    digest.update(chunk)
                index.blocks.append(
                    StoredBlock(piece.block, index.num_files, start, piece.nbytes, piece.layout, digest.digest())
                )
                held = next(blocks, None)
        index.num_files += 1
        found.check(len(index.blocks) - first)
        found.unpin(len(index.blocks) - first)
    with _Output(draft / INDEX, files) as out:
        out.write(msgspec.msgpack.encode(index))
    return files


class _Output:
    """A new file. Left without an error it is on disk, and entered into `files` with size and digest."""

    def __init__(self, path: Path, files: dict[str, File]) -> None:
        self.nbytes = 0
        self._path = path
        self._files = files
        self._digest = xxh3_128()

    def __enter__(self) -> _Output:
        self._file = open(self._path, "xb", buffering=BUFFER_NBYTES)
        return self

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.nbytes += len(data)

    def __exit__(self, kind: object, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._files[self._path.name] = File(self.nbytes, self._digest.hexdigest())


def _metadata_bytes(metadata: Metadata) -> bytes:
    blank = json.dumps(msgspec.to_builtins(metadata), indent=2).encode()
    return blank.replace(NO_DIGEST.encode(), xxh3_128_hexdigest(blank).encode(), 1)


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """An empty directory, which takes the place of `target` in the end, or vanishes on an error."""
    path = _beside(target, ".tmp")
    claim = _claimed(path)
    try:
        yield path
        os.fsync(claim)
        _publish(path, target)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        os.close(claim)
    shutil.rmtree(_beside(target, ".old"), ignore_errors=True)


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _claimed(path: Path) -> int:
    """A descriptor of the new directory `path`, locked: what a killed process left there is removed.

    Raises `FileExistsError` when another process is saving there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        left = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock(left, path)
            shutil.rmtree(path)
        finally:
            os.close(left)
    path.mkdir()
    claim = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(claim, path)
    except BaseException:
        os.close(claim)
        raise
    return claim


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(f"{path}: another process is saving there") from None
    except OSError as error:  # some network file systems do not lock directories
        log.warning("%s: cannot be locked against others that save there: %s", path, error)


def _publish(draft: Path, target: Path) -> None:
    old = _beside(target, ".old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    try:
        os.rename(draft, target)
    except BaseException:
        if old.exists():
            os.rename(old, target)
        raise
    sync_directory(target.parent)


def _repair(target: Path) -> None:
    """Undo a swap that was interrupted: only `.old` is there."""
    old = _beside(target, ".old")
    if target.exists() or not old.exists():
        return
    with contextlib.suppress(FileNotFoundError):
        draft = os.open(_beside(target, ".tmp"), os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(draft, fcntl.LOCK_EX)  # somebody may be in the middle of it: between two renames
        finally:
            os.close(draft)
    if not target.exists() and old.exists():
        os.rename(old, target)


# loading


def load(session: Session, directory: str | os.PathLike[str]) -> None:
    """See `transfer_queue.load_checkpoint`."""
    target = Path(os.path.realpath(directory))
    _repair(target)
    if not target.is_dir():
        raise CheckpointMissing(f"{target}: no such directory")
    metadata = _metadata(target)
    state = _content(target / CONTROLLER, metadata)
    index = _index(target / INDEX, _content(target / INDEX, metadata))
    with refill(session) as blocks:
        for number in range(index.num_files):
            _read_blocks(
                target / BLOCKS.format(number), metadata, [b for b in index.blocks if b.file == number], blocks
            )
        blocks.publish(state, index.layouts)


def _metadata(directory: Path) -> Metadata:
    if (directory / PICKLED).exists():
        raise CheckpointUnsupported(
            f"{directory} was saved by TransferQueue 0.1.11: {PICKLED} is a pickle, which could run any code; "
            f"it cannot be loaded"
        )
    return _sealed(directory / METADATA, FORMAT)


def _sealed(path: Path, expected: int) -> Metadata:
    """The metadata in a file of that format, once its own digest fits."""
    with _opened(path) as file:
        data = file.read()
    try:
        content = json.loads(data)
        number = content["format"]
        if type(number) is int and number != expected:
            text = f"{path} is of format {number}, this version reads {expected}; or it is damaged"
            raise CheckpointUnsupported(text)
        metadata = msgspec.convert(content, Metadata)
    except CheckpointUnsupported:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} is damaged: {error}") from None
    blank = data.replace(metadata.digest.encode("utf-8", "replace"), NO_DIGEST.encode(), 1)
    if xxh3_128_hexdigest(blank) != metadata.digest:
        raise CheckpointCorrupt(f"{path} is damaged: its digest does not match")
    return metadata


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Reader]:
    try:
        raw = io.FileIO(path)
    except FileNotFoundError:
        raise CheckpointMissing(f"{path} is missing") from None
    with io.BufferedReader(raw, BUFFER_NBYTES) as file:
        yield file


def _expected(path: Path, metadata: Metadata, file: Reader) -> File:
    """What the metadata says about an open file, once its size fits."""
    expected = metadata.files.get(path.name)
    nbytes = os.fstat(file.fileno()).st_size
    if expected is None or expected.nbytes != nbytes:
        raise CheckpointCorrupt(f"{path} has {nbytes} bytes, saved were {expected and expected.nbytes}")
    return expected


def _content(path: Path, metadata: Metadata) -> bytes:
    with _opened(path) as file:
        expected = _expected(path, metadata, file)
        data = file.read()
    if xxh3_128_hexdigest(data) != expected.xxh3_128:
        raise CheckpointCorrupt(f"{path} is damaged: its digest does not match")
    return data


def _index(path: Path, data: bytes) -> Index:
    try:
        index = msgspec.msgpack.decode(data, type=Index)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{path} is damaged: {error}") from None
    if index.format != FORMAT:
        raise CheckpointUnsupported(f"{path} is of format {index.format}, this version reads {FORMAT}")
    return index


def _read_blocks(path: Path, metadata: Metadata, stored: list[StoredBlock], blocks: Refill) -> None:
    """Fill blocks with what one file holds of them, and check every byte of it."""
    digest = xxh3_128()
    with _opened(path) as file:
        expected = _expected(path, metadata, file)
        at = 0
        for one in stored:
            if not 0 <= one.offset - at < ALIGN or not 1 <= one.nbytes <= expected.nbytes:
                raise CheckpointCorrupt(f"{path}: block {one.block} does not lie where the index says")
            digest.update(file.read(one.offset - at))
            at = one.offset + one.nbytes

            def fill(into: memoryview, one: StoredBlock = one) -> None:
                _read_into(file, into, digest)
                if xxh3_128_digest(into) != one.digest:
                    raise CheckpointCorrupt(f"{path} is damaged: the digest of block {one.block} does not match")

            blocks.fill(one.block, one.layout, one.nbytes, fill)
    if at != expected.nbytes or digest.hexdigest() != expected.xxh3_128:
        raise CheckpointCorrupt(f"{path} is damaged: its digest does not match")


def _read_into(file: Reader, into: memoryview, digest: xxh3_128) -> None:
    for start in range(0, len(into), CHUNK_NBYTES):
        part = into[start : start + CHUNK_NBYTES]
        if file.readinto(part) != len(part):
            raise CheckpointCorrupt(f"{file.raw.name}: the file ends too early")
        digest.update(part)
