"""An archive whose disk is full: what could not be written leaves nothing there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transfer_queue.errors import ServiceUnavailable, StoreFull
from transfer_queue.weights import StateDictSource, pack, plan, seal
from transfer_queue.weights.archive import Archive
from transfer_queue.weights.version.manifest import Manifest

WAIT_S = 30.0


def version(number: int) -> tuple[Manifest, dict[int, torch.Tensor]]:
    source = StateDictSource({name: torch.full((256,), float(number)) for name in "abcd"})
    where, digests, buckets = plan(source.specs(), 1024), {}, {}
    for packed in pack(source, where):
        digests.update(packed.digests)
        buckets[packed.bucket] = packed.data.clone()
    return seal(where, digests, version=number, epoch="run"), buckets


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def fails_at(write: Callable[..., Any], suffix: str, error: OSError) -> Callable[..., Any]:
    """Writes a part of the file with that suffix."""

    def pipe_file(path: str, value: bytes, **more: Any) -> Any:
        if not path.endswith(suffix):
            return write(path, value, **more)
        write(path, value[:10], **more)
        raise error

    return pipe_file


@pytest.mark.parametrize("suffix", [".00000", ".00002", ".json.part"])
@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError(errno.ENOSPC, "full"), StoreFull), (OSError(errno.EIO, "broken"), ServiceUnavailable)],
)
def test_a_version_that_could_not_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, error: OSError, expected: type[Exception]
) -> None:
    archive = Archive(f"file://{tmp_path}/archive")
    with monkeypatch.context() as patch:
        patch.setattr(archive._files, "pipe_file", fails_at(archive._files.pipe_file, suffix, error))
        with pytest.raises(expected):
            archive.put(*version(1), 1.0, timeout_s=WAIT_S)
    assert list((tmp_path / "archive").iterdir()) == []  # its run has no folder either

    archive.put(*version(1), 1.0, timeout_s=WAIT_S)
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(archive._files, "pipe_file", fails_at(archive._files.pipe_file, suffix, error))
        with pytest.raises(expected):
            archive.put(*version(2), 1.0, timeout_s=WAIT_S)
    assert files(tmp_path) == before
    archive.put(*version(2), 1.0, timeout_s=WAIT_S)
    assert [one.version for one in archive.entries(timeout_s=WAIT_S)] == [1, 2]


def test_a_version_that_is_there_whole_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest was written, and only then something failed, such as the disk as its folder was synced."""
    archive = Archive(f"file://{tmp_path}/archive")
    whole = archive._system.write_whole

    def write_whole(*args: Any) -> None:
        whole(*args)
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(archive._system, "write_whole", write_whole)
    with pytest.raises(ServiceUnavailable):
        archive.put(*version(1), 1.0, timeout_s=WAIT_S)
    (entry,) = archive.entries(timeout_s=WAIT_S)
    manifest = archive.manifest(entry, timeout_s=WAIT_S)
    assert [archive.bucket(entry, index, timeout_s=WAIT_S).nbytes for index in range(4)] == list(manifest.buckets)
