"""Files of a trace, joined to one timeline: clocks, tracks, flows, and files that somebody damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from timelines import Timeline

from transfer_queue.errors import InvalidInput
from transfer_queue.trace.lines import TraceHeader, TraceLoss, TraceSpan, TraceThread, encoded
from transfer_queue.trace.recordings import read_folder
from transfer_queue.trace.rows import MOST, named, runs_of
from transfer_queue.trace.timeline import write_timeline

SECOND = 10**9


def header(ident: str = "one", pid: int = 7, **more: Any) -> TraceHeader:
    known = {"format": 1, "host": "h", "boot": "b", "name": "n", "command": "", "monotonic_ns": 0, "wall_ns": SECOND}
    return TraceHeader(**{**known, "ident": ident, "pid": pid, **more})


def span(name: str, start_ns: int, duration_ns: int, rows: list[int] | None = None, **more: Any) -> TraceSpan:
    more.setdefault("action", {"put": "w", "get": "r", "ack": "u"}.get(name, ""))
    return TraceSpan(start_ns, duration_ns, more.pop("thread", 1), name, rows=rows or [], **more)


def write(folder: Path, *lines: Any, name: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name or lines[0].ident}.jsonl"
    file.write_bytes(encoded(list(lines))[0])
    return file


def joined(folder: Path, **options: Any) -> Timeline:
    target = folder.parent / "timeline.json"
    with target.open("wb") as into:
        write_timeline(read_folder(str(folder))[0], into, **options)
    return Timeline(target)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_processes_of_one_boot_keep_their_order_whatever_their_wall_clocks_say(folder: Path) -> None:
    write(folder, header("a", 1, wall_ns=5 * SECOND), span("put", 100, 50))
    write(folder, header("b", 2, wall_ns=9 * SECOND), span("get", 120, 50))
    assert [(one["name"], one["ts"]) for one in joined(folder).slices] == [("put", 0), ("get", 0.02)]


def test_hosts_are_aligned_by_their_wall_clocks(folder: Path) -> None:
    write(folder, header("a", 1, boot="x", monotonic_ns=500, wall_ns=SECOND + 500), span("put", 100, 50, [0, 1]))
    write(folder, header("b", 2, boot="y", monotonic_ns=9000, wall_ns=SECOND + 2000), span("get", 8100, 50, [0, 1]))
    found = joined(folder)
    assert [(one["name"], one["ts"]) for one in found.slices] == [("put", 0), ("get", 1.0)]
    assert found.ways() == {"row 0": ["put", "get"]}


def test_slices_that_overlap_lie_on_tracks_of_their_own(folder: Path) -> None:
    spans = [span("a", 0, 100, is_async=True), span("b", 50, 100, is_async=True), span("c", 120, 10, is_async=True)]
    torn = [span("own", 0, 100), span("within", 10, 20), span("beyond", 50, 100)]  # no thread does that
    write(folder, header(), TraceThread(1, "Main"), *spans, *torn)
    found = joined(folder)
    tracks = {one["name"]: found.names["thread_name", 7, one["tid"]] for one in found.slices}
    assert tracks["own"] == tracks["within"] == "Main"
    assert len({tracks[name] for name in ("own", "a", "b", "beyond")}) == 4
    assert tracks["a"] == tracks["c"]


def test_two_processes_with_one_pid_are_two(folder: Path) -> None:
    write(folder, header("a", 7), span("put", 0, 10))
    write(folder, header("b", 7), span("put", 20, 10))
    write(folder, header("c", -1), span("put", 40, 10))
    assert len({one["pid"] for one in joined(folder).slices}) == 3


def test_rows_of_two_services_are_kept_apart(folder: Path) -> None:
    write(folder, header("a", 1), span("put", 0, 10, [0, 2], service="s1"), span("put", 0, 10, [0, 2], service="s2"))
    write(folder, header("b", 2), span("get", 20, 10, [0, 1], service="s1"), span("get", 40, 10, [1, 1], service="s2"))
    assert joined(folder).ways() == {"row 0": ["put", "get"], "row 1": ["put", "get"]}


def test_flows_are_evenly_chosen_among_the_rows_that_were_read(folder: Path) -> None:
    write(
        folder,
        header(),
        span("put", 0, 10, [0, 1000]),
        span("get", 20, 10, [100, 801]),
        span("ack", 40, 10, [100, 801]),
    )
    found = joined(folder, max_flows=3)
    assert found.ways() == {f"row {row}": ["put", "get", "ack"] for row in (100, 500, 900)}
    assert joined(folder, max_flows=0).flows == {}


def test_rows_are_chosen_among_billions_without_being_listed(folder: Path) -> None:
    many = 1 << 30
    write(
        folder, header(), span("put", 0, 10, [0, many]), span("put", 10, 10, [many // 2, many]),
        span("get", 20, 10, [7, 1, 100, many, 100, 50]),
    )  # fmt: skip
    assert joined(folder, max_flows=3).ways() == {
        "row 7": ["put", "get"], f"row {99 + many // 2}": ["put", "put", "get"], f"row {99 + many}": ["put", "get"],
    }  # fmt: skip


def test_a_get_that_began_before_the_put_comes_after_it(folder: Path) -> None:
    write(folder, header("a", 1), span("get", 0, 1000, [0, 1]))
    write(folder, header("b", 2), span("put", 900, 300, [0, 1]))
    assert joined(folder).ways() == {"row 0": ["put", "get"]}


def test_keys_and_leases_stand_for_their_rows(folder: Path) -> None:
    lent = {"lease": 5, "partition": "p"}
    write(
        folder, header(), span("put", 0, 10, [3, 2], keys={"a": 3, "b": 4}, partition="p"),
        span("get", 20, 10, keys={"b": -1, "unknown": -1}, partition="p"), span("get", 40, 10, [3, 1], **lent),
        span("get", 60, 10, keys={"b": -1}, partition="another"), span("ack", 80, 10, lease=5),
    )  # fmt: skip
    assert joined(folder).ways() == {"row 3": ["put", "get", "ack"], "row 4": ["put", "get"]}


def test_a_row_that_was_read_without_end_has_its_first_and_last_steps(folder: Path) -> None:
    gets = [span("get", 20 * number, 10, [0, 1]) for number in range(1, 500)]
    write(folder, header(), span("put", 0, 10, [0, 1]), *gets, span("ack", 20_000, 10, [0, 1]))
    (way,) = joined(folder).ways().values()
    assert (len(way), way[0], way[-1]) == (64, "put", "ack")


def test_what_failed_is_shown_and_has_no_flow(folder: Path) -> None:
    write(folder, header(), span("put", 0, 10, [0, 1]), span("ack", 20, 10, [0, 1], error="LeaseExpired"))
    found = joined(folder)
    assert (found.named("ack")[0]["args"]["error"], found.flows) == ("LeaseExpired", {})


def test_the_two_files_of_a_process_are_one(folder: Path) -> None:
    write(folder, header(), span("put", 0, 10), name="x.before")
    write(folder, header(), TraceLoss(3), span("put", 20, 10), TraceLoss(5), name="x")
    found = joined(folder)
    assert (len(found.named("put")), found.about["spans_lost"]) == (2, 5)


DAMAGE = {
    "not json": b"\x00\xff\n",
    "another line": b'["lines",1]\n',
    "a wrong type": b'["span","now",10,1,"put"]\n',
    "a time that is none": b'["span",-5,10,1,"put"]\n',
    "half a run": b'["span",5,10,1,"put","","","w","",1,0,[1]]\n',
    "a run without end": b'["span",5,10,1,"put","","","w","",1,0,[0,99999999999999]]\n',
    "deep": b'["span",' + b"[" * 5000 + b"\n",
    "too large": b'["span",99999999999999999999999999,10,1,"put"]\n',
    "a second header": encoded([header()])[0],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_line_is_skipped_and_said(folder: Path, damage: bytes) -> None:
    file = write(folder, header(), span("put", 0, 10, [0, 1]))
    file.write_bytes(file.read_bytes() + damage + encoded([span("get", 20, 10, [0, 1])])[0])
    assert read_folder(str(folder))[1] == ["one.jsonl: 1 damaged lines: skipped"]
    assert joined(folder).ways() == {"row 0": ["put", "get"]}


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_half_a_line_is_skipped_and_said(folder: Path, cut: int) -> None:
    file = write(folder, header(), span("put", 0, 10), span("get", 20, 10))
    file.write_bytes(file.read_bytes()[:-cut])
    assert read_folder(str(folder))[1] == ["one.jsonl: the last line is torn, as a kill leaves it: skipped"]
    assert [one["name"] for one in joined(folder).slices] == ["put"]


def test_foreign_files_are_skipped_and_said(folder: Path) -> None:
    write(folder, header(), span("put", 0, 10))
    write(folder, header("new", format=2))
    (folder / "a.jsonl").write_bytes(b"")
    (folder / "b.jsonl").write_bytes(b"{}\n" * 3)
    (folder / "c.jsonl").mkdir()
    (folder / "notes.txt").write_text("not ours")
    remarks = [one.partition(": ") for one in read_folder(str(folder))[1]]
    assert [(name, text.rpartition(": ")[2]) for name, _, text in remarks] == [
        ("a.jsonl", "skipped"), ("b.jsonl", "skipped"), ("new.jsonl", "skipped"),
    ]  # fmt: skip
    assert len(joined(folder).slices) == 1


def test_a_folder_of_damaged_files_is_an_error_that_says_so(folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no folder of a trace.*: TQ_TRACE=.* makes one$"):
        read_folder(str(folder))
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\x00" * 100)
    with pytest.raises(InvalidInput, match=r"a\.jsonl: not a file of a trace"):
        read_folder(str(folder))


def test_a_timeline_of_nothing_is_one(folder: Path) -> None:
    write(folder, header())
    assert joined(folder).slices == []
    assert joined(folder, since_s=0.0).slices == []


def test_the_last_seconds_of_a_job_may_be_all_of_it(folder: Path) -> None:
    write(folder, header(), span("put", 0, 10))
    assert len(joined(folder, since_s=math.inf).slices) == len(joined(folder).slices) == 1


def test_each_event_is_a_line_of_its_own(folder: Path) -> None:
    write(folder, header(), span('"\n', 0, 10, partition="</script>"))
    joined(folder)
    lines = (folder.parent / "timeline.json").read_text().splitlines()
    assert json.loads(lines[-2].rstrip(","))["name"] == '"\n'


def test_rows_are_few_numbers() -> None:
    assert runs_of(np.arange(5, 9)) == [5, 4]
    assert runs_of(np.array([9, 3, 4, 4])) == [3, 2, 9, 1]
    assert runs_of(np.empty(0, np.int64)) == []
    scattered = np.arange(0, 30_000, 3)
    runs = runs_of(scattered)
    assert 0 < len(runs) <= 2 * MOST
    assert set(runs[::2]) <= set(scattered.tolist())
    assert set(runs[::2]) & set(runs_of(scattered[:2000])[::2]), "a sample has rows of each part"


def test_a_large_sample_of_keys_lies_within_smaller_ones() -> None:
    keys = [f"key-{number}" for number in range(10_000)]
    all_keys, some = named(keys, np.arange(10_000)), named(keys[:500], None)
    assert len(all_keys) <= MOST
    assert all(row == int(key.removeprefix("key-")) for key, row in all_keys.items())
    assert {key for key in all_keys if int(key.removeprefix("key-")) < 500} <= some.keys()
    assert set(some.values()) == {-1}


def test_text_that_is_none_costs_its_own_line_alone() -> None:
    data, lost = encoded([span("put", 0, 1), span("\ud800", 0, 1), span("get", 0, 1)])
    assert lost == 1
    assert [msgspec.json.decode(line)[4] for line in data.splitlines()] == ["put", "get"]
