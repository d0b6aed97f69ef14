"""Frames on a disk: what is torn is left out, what is damaged is refused."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from transfer_queue.errors import ConfigError, JournalCorrupt, JournalInUse, JournalUnsupported, StoreFull
from transfer_queue.server.journal import files
from transfer_queue.server.journal import payloads as payloads_module
from transfer_queue.server.journal.files import FrameFile, claim, framed, numbers
from transfer_queue.server.journal.log import LogFile
from transfer_queue.server.journal.payloads import Payloads, Place


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of three entries, and its path."""
    file = LogFile(tmp_path, 0, 0, True)
    for number in range(3):
        file.write(number, [f"entry {number}".encode() * 9])
    os.close(file.fd)
    return file.path


def entries(path: Path) -> list[bytes]:
    with FrameFile(path.parent, "log", 0) as file:
        return [frame.payload for frame in file.frames()]


def places(path: Path) -> list[int]:
    """Where each frame begins, the head's first."""
    with FrameFile(path.parent, "log", 0) as file:
        return [0, *(frame.offset for frame in file.frames())]


def test_what_was_written_is_read(log: Path) -> None:
    assert entries(log) == [f"entry {number}".encode() * 9 for number in range(3)]


def test_a_file_that_ends_at_any_byte_has_the_entries_before(log: Path) -> None:
    data = log.read_bytes()
    whole = [*places(log), len(data)]
    for end in range(whole[1], len(data)):
        log.write_bytes(data[:end])
        assert len(entries(log)) == sum(one <= end for one in whole) - 2


def test_a_torn_entry_may_be_garbage_or_zeros(log: Path) -> None:
    data = log.read_bytes()
    last = places(log)[-1]
    for torn in (bytes(len(data) - last), random.Random(1).randbytes(5000), data[last:-1] + b"?"):
        log.write_bytes(data[:last] + torn)
        assert len(entries(log)) == 2


def test_every_changed_byte_before_the_last_entry_is_found(log: Path) -> None:
    data = log.read_bytes()
    last = places(log)[-1]
    head = len(data[: files.HEAD_NBYTES].rstrip(b"\0")) + 1  # its last byte may be 0
    padding = range(head, files.HEAD_NBYTES)
    for at in [*range(head - 1), *padding, *range(files.HEAD_NBYTES, last)]:
        log.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        if at in padding:
            assert len(entries(log)) == 3
            continue
        with pytest.raises(JournalCorrupt, match=str(log)):
            entries(log)


def test_a_torn_entry_may_hold_pieces_of_journals(log: Path, tmp_path: Path) -> None:
    """Rows may be anything, and so may what a disk had there before."""
    data = log.read_bytes()
    first, last = places(log)[1], places(log)[-1]
    (tmp_path / "other").mkdir()
    other = LogFile(tmp_path / "other", 0, 0, True)
    other.write(7, [b"later"])
    os.close(other.fd)
    for piece in (data[first:last], other.path.read_bytes()):
        log.write_bytes(data[:last] + data[last : last + 20] + piece)
        assert len(entries(log)) == 2


def test_a_file_of_another_kind_or_format_is_refused(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.rename(log.with_name("log-00000007"))
    with pytest.raises(JournalCorrupt, match="is log-00000000"):
        FrameFile(log.parent, "log", 7)
    monkeypatch.setattr(files, "FORMAT", 2)
    with pytest.raises(JournalUnsupported, match="of format 1, this version reads 2"):
        FrameFile(log.parent, "log", 7)
    with pytest.raises(JournalCorrupt, match="log-00000001 is missing"):
        FrameFile(log.parent, "log", 1)


def test_an_empty_file_has_no_head(tmp_path: Path) -> None:
    (tmp_path / "log-00000000").write_bytes(b"")
    with FrameFile(tmp_path, "log", 0) as file:
        assert file.head is None
        assert list(file.frames()) == []


def test_a_log_that_the_disk_has_no_space_for_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        with pytest.raises(OSError, match="no space"):
            LogFile(tmp_path, 0, 0, True)
    assert list(tmp_path.iterdir()) == []
    os.close(LogFile(tmp_path, 0, 0, True).fd)


def test_files_are_found_by_their_names(tmp_path: Path) -> None:
    for name in ("log-00000003", "log-00000001", "snapshot-00000002", "snapshot-00000004.tmp", "log-1", "other"):
        (tmp_path / name).touch()
    assert (numbers(tmp_path, "log"), numbers(tmp_path, "snapshot")) == ([1, 3], [2])


def test_a_frame_says_when_it_was_written(tmp_path: Path) -> None:
    first, second = framed(1, [b"x"]), framed(1, [b"x"])
    assert first[0] != second[0]


def test_a_directory_has_one_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "VACATE_S", 0.0)
    held = claim(tmp_path / "new" / "journal")
    try:
        with pytest.raises(JournalInUse, match="another server"):
            claim(tmp_path / "new" / "journal")
    finally:
        held.close()
    claim(tmp_path / "new" / "journal").close()


def test_the_names_of_new_directories_above_a_journal_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, synced = os.fsync, set[str]()

    def sync(fd: int) -> None:
        fsync(fd)
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", sync)
    claim(tmp_path / "run" / "7" / "journal").close()
    assert synced == {str(tmp_path), f"{tmp_path}/run", f"{tmp_path}/run/7"}


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"server\.journal_dir"):
        claim(tmp_path / "file")


# blocks


@pytest.fixture
def payloads(tmp_path: Path) -> Payloads:
    return Payloads(tmp_path, ())


def store(payloads: Payloads, value: int, nbytes: int = 100_000) -> Place:
    place = payloads.take(nbytes)
    return place._replace(digest=payloads.write(place, full(value, nbytes)))


def full(value: int, nbytes: int = 100_000) -> object:
    import numpy as np

    return np.full(nbytes, value, np.uint8)


def test_blocks_are_read_as_they_were_written(payloads: Payloads, tmp_path: Path) -> None:
    places = [store(payloads, number) for number in range(3)]
    payloads.close()
    again = Payloads(tmp_path, places)
    for number, place in enumerate(places):
        into = full(9)
        again.read(place, into)  # type: ignore[arg-type]
        assert (into == full(number)).all()  # type: ignore[attr-defined]
    assert store(again, 7).offset not in {place.offset for place in places}
    again.close()


def test_a_range_that_was_given_back_is_used_again(payloads: Payloads) -> None:
    first = store(payloads, 1)
    store(payloads, 2)
    payloads.give(first)
    assert store(payloads, 3).offset == first.offset
    payloads.close()


def test_what_is_free_at_the_end_of_a_file_is_given_back(
    payloads: Payloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads_module, "SHRINK_NBYTES", 100_000)
    monkeypatch.setattr(payloads_module, "STEP_NBYTES", 250_000)
    places = [store(payloads, number) for number in range(6)]
    path = tmp_path / "blocks-00000000"
    assert not payloads.shrink()
    for place in places[1:]:
        payloads.give(place)
    assert payloads.shrink()
    assert payloads.shrink()
    assert not payloads.shrink()
    assert path.stat().st_size < places[1].offset + 100_000
    again = [store(payloads, 7) for _ in range(2)]
    for place in (places[0], *again):
        payloads.read(place, full(0))  # type: ignore[arg-type]
    payloads.close()


def test_a_changed_byte_of_a_block_is_found(payloads: Payloads, tmp_path: Path) -> None:
    place = store(payloads, 1)
    path = tmp_path / "blocks-00000000"
    data = bytearray(path.read_bytes())
    data[place.offset + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalCorrupt, match=f"{path} is damaged"):
        payloads.read(place, full(0))  # type: ignore[arg-type]
    payloads.close()


def test_a_file_that_ends_within_a_page_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads_module, "FILE_NBYTES", 1 << 20)
    first = Payloads(tmp_path, ())
    place = store(first, 1, (1 << 20) + 1000)
    first.close()
    again = Payloads(tmp_path, [place])
    again.read(place, full(0, place.nbytes))  # type: ignore[arg-type]
    again.close()


def test_blocks_that_overlap_or_have_no_file_are_refused(payloads: Payloads, tmp_path: Path) -> None:
    place = store(payloads, 1)
    payloads.close()
    with pytest.raises(JournalCorrupt, match="overlap"):
        Payloads(tmp_path, [place, place])
    with pytest.raises(JournalCorrupt, match="blocks-00000003 is missing"):
        Payloads(tmp_path, [place._replace(file=3)])


def test_no_blocks_file_is_made_in_a_directory_that_another_server_has_by_now(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    held = claim(directory)
    payloads = Payloads(directory, (), held.id)
    directory.rename(tmp_path / "aside")
    other = claim(directory)
    with pytest.raises(StoreFull, match="another journal"):
        payloads.take(100_000)
    assert os.listdir(directory) == ["lock"]
    held.close()
    other.close()


@pytest.mark.parametrize("is_another_there", [False, True])
def test_a_journal_goes_on_without_its_lock_unless_another_server_took_one(
    tmp_path: Path, is_another_there: bool
) -> None:
    held = claim(tmp_path)
    (tmp_path / "lock").unlink()
    other = claim(tmp_path) if is_another_there else None
    payloads = Payloads(tmp_path, (), held.id)
    if other is None:
        assert payloads.take(100_000).file == 0
        payloads.close()
    else:
        with pytest.raises(StoreFull, match="another journal"):
            payloads.take(100_000)
        other.close()
    held.close()


def test_a_block_that_no_disk_has_space_for_is_refused(payloads: Payloads) -> None:
    with pytest.raises(StoreFull, match="disk of the journal"):
        payloads.take(1 << 42)
    assert payloads.used_nbytes == 0
    payloads.close()
