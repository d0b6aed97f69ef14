"""Checkpoints: what they are made of.

metadata.json       the list of all other files, with the user's metadata (`saved.files`)
controller.msgpack  the controller's state; opaque here
blocks.msgpack      `Index`: where every block lies, its layout and digest
blocks-00000.bin    blocks one after the other, 64-byte aligned; the next file begins where one has reached 1 GiB
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import msgspec
from xxhash import xxh3_128, xxh3_128_digest

from transfer_queue.arguments import flag
from transfer_queue.client.session import Session
from transfer_queue.client.transfer.snapshots import PinnedSnapshot, Refill, refill, snapshot
from transfer_queue.codec.layout import ALIGN
from transfer_queue.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    CheckpointUnsupported,
    UnsupportedValue,
)
from transfer_queue.saved.folder import Draft
from transfer_queue.saved.places import folder_at
from transfer_queue.saved.reading import SavedFolder
from transfer_queue.structs import decodable

log = logging.getLogger("transfer_queue")

FORMAT = 1
METADATA, CONTROLLER, INDEX, BLOCKS = "metadata.json", "controller.msgpack", "blocks.msgpack", "blocks-{:05d}.bin"
PICKLED = "controller_state.pkl"  # what TransferQueue 0.1.11 writes
FILE_NBYTES = 1 << 30


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
        user: dict[str, Any] = json.loads(json.dumps(dict({} if metadata is None else metadata)))
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedValue(f"metadata is not JSON: {error}") from None
    if not flag(include_storage, "include_storage"):
        log.warning("include_storage=False has no effect: rows live in memory and would be lost, so they are saved")
    folder = folder_at(directory)
    folder.repair(METADATA)
    folder.refuse_other(METADATA)
    with folder.replacing(METADATA) as draft, snapshot(session) as found:
        _write(draft, found)
        draft.seal(METADATA, FORMAT, user)


def _write(draft: Draft, found: PinnedSnapshot) -> None:
    """Write state and blocks. Pins end with the file that holds their block."""
    draft.expected_nbytes = len(found.state) + sum(one.piece.nbytes for one in found.pinned)
    with draft.output(CONTROLLER) as out:
        out.write(found.state)
    index = Index(FORMAT, 0, found.layouts, [])
    blocks = found.blocks()
    held = next(blocks, None)
    while held is not None:
        first = len(index.blocks)
        with draft.output(BLOCKS.format(index.num_files)) as out:
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
    with draft.output(INDEX) as out:
        out.write(msgspec.msgpack.encode(index))


def nbytes_of(directory: str | os.PathLike[str]) -> int:
    """Of the files of a checkpoint, but for the list of them."""
    return sum(file.nbytes for file in SavedFolder(folder_at(directory), METADATA, FORMAT).metadata.files.values())


# loading


def load(session: Session, directory: str | os.PathLike[str]) -> None:
    """See `transfer_queue.load_checkpoint`."""
    folder = folder_at(directory)
    folder.repair(METADATA)
    if not folder.is_there():
        raise CheckpointMissing(f"{folder}: no such directory")
    if folder.has(PICKLED):
        raise CheckpointUnsupported(
            f"{folder} was saved by TransferQueue 0.1.11: {PICKLED} is a pickle, which could run any code; "
            f"it cannot be loaded"
        )
    found = SavedFolder(folder, METADATA, FORMAT)
    state = found.content(CONTROLLER)
    index = _index(found.path(INDEX), found.content(INDEX))
    with refill(session) as blocks:
        for number in range(index.num_files):
            _read_blocks(found, number, [one for one in index.blocks if one.file == number], blocks)
        blocks.publish(state, index.layouts)


def _index(where: str, data: bytes) -> Index:
    try:
        index = msgspec.msgpack.decode(data, type=Index)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{where} is damaged: {error}") from None
    if index.format != FORMAT:
        raise CheckpointUnsupported(f"{where} is of format {index.format}, this version reads {FORMAT}")
    return index


def _read_blocks(found: SavedFolder, number: int, stored: list[StoredBlock], blocks: Refill) -> None:
    """Fill blocks with what one file holds of them, and check every byte of it."""
    with found.opened(BLOCKS.format(number)) as file:
        at = 0
        for one in stored:
            if not 0 <= one.offset - at < ALIGN or not 1 <= one.nbytes <= file.listed.nbytes:
                raise CheckpointCorrupt(f"{file.where}: block {one.block} does not lie where the index says")
            file.skip(one.offset - at)
            at = one.offset + one.nbytes

            def fill(into: memoryview, one: StoredBlock = one) -> None:
                file.fill(into)
                if xxh3_128_digest(into) != one.digest:
                    raise CheckpointCorrupt(f"{file.where} is damaged: the digest of block {one.block} does not match")

            blocks.fill(one.block, one.layout, one.nbytes, fill)
        file.check()
