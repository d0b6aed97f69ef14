"""Files that the system refuses: a disk that is full, names that are too long, a file where a folder should be."""

from __future__ import annotations

import errno
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import transfer_queue as tq

Spawn = Callable[[str], Any]

SMALL_DISK = """
import ctypes, errno, os, sys
libc, where = ctypes.CDLL(None, use_errno=True), {where!r}
if (
    libc.unshare(0x20000)
    or libc.mount(b"none", b"/", None, 0x4000 | 1 << 18, None)
    or libc.mount(b"tmpfs", where.encode(), b"tmpfs", 0, b"size=1m")
):
    print("not permitted", flush=True)
    sys.exit()
import torch
import transfer_queue as tq
tq.init()
client = tq.get_client()
client.checkpoint(0, ["t"])
tq.kv_batch_put(["a", "b"], "p", {{"x": torch.rand(2, 1 << 19)}})
client.get_data(client.get_meta(["x"], 2, "p", task_name="t"))
client.checkpoint(1, ["t"])
"""


@pytest.fixture
def on_small_disk(child: Spawn, tmp_path: Path) -> Callable[[str], str]:
    """Runs code beside rows of 4 MB, where `where` is a file system of 1 MiB; what it printed."""

    def run(code: str) -> str:
        printed: str = child(SMALL_DISK.format(where=str(tmp_path)) + textwrap.dedent(code)).finish()
        if printed == "not permitted":
            pytest.skip("file systems cannot be mounted here")
        return printed

    return run


WRITES = {
    "checkpoint": "tq.save_checkpoint(place)",
    "dump": "tq.dump_data_by_key(place, ['a', 'b'], 'p')",
    "step": "tq.save_step(place, 1, 't')",
    "export": "tq.export_table('p', place, 'hf')",
    "file": "place += '.parquet'; tq.export_table('p', place)",
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_full_disk_is_told_with_the_place_what_is_free_there_and_what_to_do(
    on_small_disk: Callable[[str], str], kind: str
) -> None:
    printed = on_small_disk(f"""
        place = where + "/out"
        try:
            {WRITES[kind]}
        except OSError as error:
            text = str(error)
            assert (error.errno, error.filename) == (errno.ENOSPC, place), text
            assert "No space left" in text and "1048576 are free" in text and "make room there" in text, text
            assert "{kind}" != "checkpoint" or "4194" in text.partition("bytes are needed")[0], text
            assert os.listdir(where) == []
            print("told")
    """)
    assert printed == "told"


def test_a_trace_that_finds_no_room_names_its_file(on_small_disk: Callable[[str], str]) -> None:
    printed = on_small_disk("""
        import logging
        from transfer_queue.trace import switch
        told = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logging.getLogger("transfer_queue").addHandler(handler)
        with open(where + "/ballast", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        tq.trace.start(where + "/trace")
        while switch.is_on:
            tq.kv_list()
        (text,) = told
        assert where + "/trace/" in text and "No space left" in text and "trace.start" in text, text
        print("told")
    """)
    assert printed == "told"


SAVES = {
    "checkpoint": lambda place: tq.save_checkpoint(place),
    "dump": lambda place: tq.dump_data_by_key(place, ["a"], "p"),
    "export": lambda place: tq.export_table("p", place),
}


@pytest.fixture
def row(service: Callable[..., tq.TransferQueueClient]) -> None:
    service()
    tq.kv_put("a", "p", fields={"x": 1})


@pytest.mark.usefixtures("row")
@pytest.mark.parametrize("kind", SAVES)
def test_a_file_above_the_folder_is_not_taken_for_what_was_saved_before(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        SAVES[kind](tmp_path / "file" / "out")


@pytest.mark.usefixtures("row")
def test_a_checkpoint_has_a_name_under_which_it_can_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="at most") as refused:
        tq.save_checkpoint(tmp_path / ("n" * 239))
    assert refused.value.errno == errno.ENAMETOOLONG
    for _ in range(2):
        tq.save_checkpoint(tmp_path / ("n" * 238))
    assert os.listdir(tmp_path) == ["n" * 238]
