"""The directory of what Mooncake's memory has no room for: which of its files are deleted, and when."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Child

from transfer_queue.errors import ConfigError
from transfer_queue.storage.engines.offload import LONE_S, OffloadFolder, OffloadSettings, offload_settings

KEYS = [f"tq/00ff/{number}" for number in range(20)]


def moved(folder: OffloadFolder, key: str, nbytes: int = 100) -> Path:
    """As it lies there once Mooncake has moved it."""
    path = Path(folder.path, str(sum(1 for _ in Path(folder.path).iterdir()) + 7000))
    path.with_suffix(".bucket").write_bytes(b"\0" * nbytes)
    path.with_suffix(".meta").write_bytes(b"\x08\x8e\x12\x0edefault\0" + key.encode() + b"\x1a\x07\x10\x0e")
    return path


def names(folder: OffloadFolder) -> set[str]:
    return set(os.listdir(folder.path))


def test_the_files_of_what_is_deleted_are_and_no_others(tmp_path: Path) -> None:
    folder = OffloadFolder(str(tmp_path))
    one, ten = moved(folder, KEYS[1]), moved(folder, KEYS[10])
    folder.delete([KEYS[1]])
    assert names(folder) == {ten.name + ".bucket", ten.name + ".meta"}, one
    folder.close()


def test_a_file_that_appears_after_its_key_was_deleted_goes_with_the_next(tmp_path: Path) -> None:
    folder = OffloadFolder(str(tmp_path))
    folder.delete([KEYS[1]])
    moved(folder, KEYS[1])
    folder.delete([KEYS[2]])
    assert not names(folder)
    folder.close()


def test_what_is_left_of_an_attempt_that_failed_is_deleted_later(tmp_path: Path) -> None:
    folder = OffloadFolder(str(tmp_path))
    path = Path(folder.path, "1.bucket")
    path.write_bytes(b"half of it")
    folder.delete([KEYS[1]])
    assert path.exists(), "it may be being written"
    os.utime(path, (0, time.time() - LONE_S - 1))
    folder.delete([KEYS[1]])
    assert not path.exists()
    folder.close()


def test_a_file_that_is_gone_or_short_is_found(tmp_path: Path) -> None:
    folder = OffloadFolder(str(tmp_path))
    path = moved(folder, KEYS[1])
    assert folder.has(KEYS[1], 100)
    assert not folder.has(KEYS[1], 101)
    assert not folder.has(KEYS[2], 0)
    path.with_suffix(".bucket").unlink()
    assert not folder.has(KEYS[1], 100)
    folder.close()


def test_a_directory_ends_with_its_process_and_others_stay(tmp_path: Path) -> None:
    mine = OffloadFolder(str(tmp_path))
    child = Child(f"""
        from transfer_queue.storage.engines.offload import OffloadFolder
        folder = OffloadFolder({str(tmp_path)!r})
        print(folder.path, flush=True)
        input()
    """)
    theirs = child.line()
    OffloadFolder(str(tmp_path)).close()
    assert set(os.listdir(tmp_path)) == {os.path.basename(mine.path), os.path.basename(theirs)}
    child.close()
    OffloadFolder(str(tmp_path)).close()
    assert os.listdir(tmp_path) == [os.path.basename(mine.path)], "that of the killed process is deleted"
    mine.close()
    assert not os.listdir(tmp_path)


def test_where_there_can_be_no_directory_the_setting_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"offload\.file_storage_path"):
        OffloadFolder(str(tmp_path / "file"))


def test_settings_are_those_of_the_other_package() -> None:
    assert offload_settings(None) is None
    assert offload_settings({"enabled": False, "use_uring": True}) is None
    given = {"enabled": True, "client_port": 42052, "file_storage_path": "/somewhere", "use_uring": True}
    assert offload_settings(given) == OffloadSettings("/somewhere", use_uring=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enabled", "yes"), ("file_storage_path", "relative"), ("local_buffer_size_bytes", 0), ("use_uring", 1),
        ("heartbeat_interval_seconds", 0), ("heartbeat_interval_seconds", 1.5), ("eviction_ratio", 0),
        ("eviction_high_watermark_ratio", 1.1), ("eviction_high_watermark_ratio", True),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"MooncakeStore.offload.{name}"):
        offload_settings({"enabled": True, name: value})
