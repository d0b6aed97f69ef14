"""TQ_TRACE in the processes of a job, and `tq trace`, which joins what they recorded to one timeline."""

from __future__ import annotations

import asyncio
import os
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import Child, until
from paths import SOURCES
from timelines import Timeline
from zygote import CHILDREN

import transfer_queue as tq
from transfer_queue.errors import DeadlineExceeded, InvalidInput

Start = Callable[[str], Child]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What TQ_TRACE names, for this process and those that it starts."""
    folder = tmp_path / "trace"
    monkeypatch.setenv("TQ_TRACE", str(folder))
    yield folder
    tq.trace.stop()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from transfer_queue.cli import main; main()"
    return CHILDREN.run(["-c", code, "trace", *arguments], {"PYTHONPATH": SOURCES, "PATH": "/usr/bin:/bin"})


def joined(folder: Path, *options: str) -> Timeline:
    """The timeline, after what this process has not written yet."""
    tq.trace.stop()
    done = command(str(folder), "-o", str(folder.parent / "timeline.json"), *options)
    assert done.returncode == 0, done.stderr
    return Timeline(folder.parent / "timeline.json")


def text_of(folder: Path) -> str:
    return "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.jsonl"))


def test_a_row_is_followed_from_its_put_to_its_ack_in_another_process(
    folder: Path, client: tq.TransferQueueClient, child: Start
) -> None:
    client.put({"x": torch.zeros(4, 3)}, partition_id="train")
    client.set_partition("train", size=4)
    trainer = child("""
        import transfer_queue as tq
        tq.init()
        for batch in tq.stream("train", ["x"], task="actor", batch_size=2):
            pass
        tq.close()
    """)  # fmt: skip
    trainer.finish()
    found = joined(folder)
    (put,) = found.named("put")
    assert put["pid"] == os.getpid()
    assert put["args"] | {"service": ""} == {
        "partition": "train", "rows": 4, "bytes": 64, "global_indexes": "0-3", "service": "",
    }  # fmt: skip
    fetches = [one for one in found.named("stream") if one["args"].get("rows")]
    assert [(one["pid"], one["args"]["task"], one["args"]["bytes"]) for one in fetches] == [
        (trainer.pid, "actor", 64)
    ] * 2
    assert found.ways() == {f"row {row}": ["put", "stream", "ack"] for row in range(4)}
    assert [step["pid"] for step in found.flows["row 2"]] == [os.getpid(), trainer.pid, trainer.pid]
    assert {"MainThread", "tq-prefetch"} <= set(found.names.values())


def test_rows_are_followed_by_their_keys(folder: Path, client: tq.TransferQueueClient) -> None:
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2, 3)})
    tq.kv_put("a", "p", {"y": torch.zeros(3)})
    tq.kv_batch_get(["a", "b"], "p", select_fields=["x"])
    tq.kv_batch_get("a", "p", select_fields=["y"])
    found = joined(folder)
    assert found.ways() == {
        "row 0": ["kv_batch_put", "kv_put", "kv_batch_get", "kv_batch_get"],
        "row 1": ["kv_batch_put", "kv_batch_get"],
    }
    assert found.named("kv_batch_get")[0]["args"]["keys"] == ["a", "b"]


def test_reads_say_how_many_bytes_they_read(folder: Path, client: tq.TransferQueueClient) -> None:
    lengths = torch.tensor([1000, 3000, 2000])
    ragged = torch.nested.as_nested_tensor([torch.zeros(n) for n in lengths.tolist()], layout=torch.jagged)
    tq.kv_batch_put(["a", "b", "c"], "p", {"x": torch.zeros(3, 4096), "y": ragged, "z": torch.zeros(3)})
    tq.kv_batch_get(["a", "b", "c"], "p", select_fields=["x"])
    tq.kv_batch_get(["b"], "p", select_fields=["x", "z"])
    tq.kv_batch_get(["a", "b", "c"], "p", select_fields=["y"])
    client.get_data(client.get_meta(["x"], 3, "p", task_name="far"))  # too much to come along
    for _ in range(2):
        client.get_data(client.get_meta(["z"], 1, "p", task_name="near"))
    found = joined(folder)
    assert [one["args"]["bytes"] for one in found.named("kv_batch_get")] == [49152, 16388, 24032]
    assert [one["args"]["bytes"] for one in found.named("get_data")] == [49152, 4, 4]
    assert all(one["args"]["rows"] for one in found.named("kv_batch_get") + found.named("get_data"))


def test_groups_are_followed_to_the_ack_of_their_lease(folder: Path, client: tq.TransferQueueClient) -> None:
    pool = tq.group_pool("train", tq.GroupPolicy.windowed(1))
    pool.open("prompt-7", 2)
    for attempt in pool.claim(max_slots=2):
        pool.finish(attempt, {"tokens": torch.zeros(1, 2)}, reward=1.0, tokens=2)
    pool.ack(pool.select(min_groups=1))
    pool.open("prompt-8", 2)
    pool.finish_batch([one.result(tokens=2) for one in pool.claim(max_slots=2)], {"tokens": torch.zeros(2, 2)})
    pool.ack(pool.select(min_groups=1))
    single, batch = ["finish", "select", "ack"], ["finish_batch", "select", "ack"]
    found = joined(folder)
    assert found.ways() == {"row 0": single, "row 1": single, "row 2": batch, "row 3": batch}
    assert all(one["args"]["lease"] > 0 for one in found.named("select"))  # as `tq leases` shows it


def test_a_wait_is_seen_with_how_long_it_was(folder: Path, client: tq.TransferQueueClient, child: Start) -> None:
    waiting = child("""
        import transfer_queue as tq
        tq.init()
        client = tq.get_client()
        print("asks", flush=True)
        client.get_data(client.get_meta(["x"], 1, "p", task_name="t"))
        tq.close()
    """)  # fmt: skip
    assert waiting.line() == "asks"
    with pytest.raises(DeadlineExceeded):
        client.get_meta(["x"], 1, "p", task_name="other", timeout_s=0.05)
    client.put({"x": [1]}, partition_id="p")
    waiting.finish()
    found = joined(folder)
    failed, got = sorted(found.named("get_meta"), key=lambda one: one["pid"] != os.getpid())
    assert failed["args"]["error"] == "DeadlineExceeded"
    assert failed["args"]["waited_ms"] >= 50
    assert got["args"]["waited_ms"] > 0
    assert any(one["dur"] >= 50_000 for one in found.named("parked"))
    assert found.ways() == {"row 0": ["put", "get_meta", "get_data"]}


def test_a_killed_process_loses_only_what_was_not_written_yet(
    folder: Path, client: tq.TransferQueueClient, child: Start
) -> None:
    writer = child("""
        import threading, torch, transfer_queue as tq
        tq.init()
        tq.kv_put("a", "early", {"x": torch.zeros(3)})
        print("put", flush=True)
        tq.get_client().get_meta(["x"], 1, "never", task_name="t")
    """)  # fmt: skip
    assert writer.line() == "put"
    until(lambda: '"early"' in text_of(folder), "the flush of a span")
    writer.kill()
    found = joined(folder)
    assert [one["args"]["partition"] for one in found.named("kv_put")] == ["early"]


def test_half_a_line_at_the_end_is_skipped_and_said(folder: Path, client: tq.TransferQueueClient) -> None:
    client.put({"x": [1]}, partition_id="p")
    client.put({"x": [2]}, partition_id="p")
    tq.trace.stop()
    (file,) = folder.glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-20])
    done = command(str(folder), "-o", str(folder.parent / "t.json"))
    assert (done.returncode, done.stderr) == (0, f"{file.name}: the last line is torn, as a kill leaves it: skipped\n")
    assert len(Timeline(folder.parent / "t.json").named("put")) == 1


@pytest.mark.parametrize("way", ["os.fork", "multiprocessing"])
def test_a_forked_process_writes_a_file_of_its_own(
    folder: Path, client: tq.TransferQueueClient, child: Start, way: str
) -> None:
    parent = child(f"""
        import multiprocessing, os, sys, transfer_queue as tq
        tq.init()
        put = lambda name: tq.get_client().put({{"x": [1]}}, partition_id=name)
        put("parent")
        if {way!r} == "os.fork":
            pid = os.fork()
            if not pid:
                put("forked")
                sys.exit()
            os.waitpid(pid, 0)
        else:
            forked = multiprocessing.get_context("fork").Process(target=put, args=("forked",))
            forked.start()
            forked.join()
        put("parent")
        tq.close()
    """)  # fmt: skip
    parent.finish()
    found = joined(folder)
    puts = {one["args"]["partition"]: one["pid"] for one in found.named("put")}
    assert len(found.named("put")) == 3
    assert puts["parent"] == parent.pid != puts["forked"]


def test_the_writing_thread_imports_nothing_that_a_fork_could_cut_off(
    folder: Path, client: tq.TransferQueueClient, child: Start
) -> None:
    writer = child("""
        import sys, threading, transfer_queue as tq
        tq.init()
        tq.get_client().get_partition("p")
        imported = []
        class Finder:
            def find_spec(name, path=None, target=None):
                if threading.current_thread().name == "tq-trace":
                    imported.append(name)
        sys.meta_path.insert(0, Finder)
        tq.get_client().put({"x": [1]}, partition_id="p")
        tq.trace.stop()
        print(imported)
        tq.close()
    """)  # fmt: skip
    assert writer.line() == "[]"
    assert len(joined(folder).named("put")) == 1


def test_a_timeline_has_a_name(folder: Path) -> None:
    folder.mkdir()
    assert "tq: / is no file" in str(command(str(folder), "-o", "/"))


def test_a_folder_that_cannot_be_written_is_one_warning(folder: Path, child: Start) -> None:
    folder.write_text("a file")
    (folder.parent / "trace.d").write_text("a file, too")
    code = """
        import transfer_queue as tq
        tq.init()
        for number in range(3):
            tq.get_client().put({"x": [1]}, partition_id="p")
        from transfer_queue.trace import switch
        while switch.is_on:
            tq.get_client().put({"x": [1]}, partition_id="p")
        print(tq.get_client().get_partition("p")["rows"] >= 3)
        tq.close()
    """
    done = CHILDREN.run(["-c", textwrap.dedent(code)], {**os.environ, "PYTHONPATH": SOURCES})
    assert done.stdout == "True\n", done.stderr
    assert done.stderr.count("records no trace any more") == 1


def test_a_full_disk_ends_the_trace_and_not_the_job(folder: Path) -> None:
    code = """
        import resource, transfer_queue as tq
        tq.init()
        from transfer_queue.trace import switch
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        while switch.is_on:
            tq.kv_list()
        tq.get_client().put({"x": [1]}, partition_id="p")
        print(tq.get_client().get_partition("p")["rows"])
        tq.close()
    """
    done = CHILDREN.run(["-c", textwrap.dedent(code)], {**os.environ, "PYTHONPATH": SOURCES})
    assert done.stdout == "1\n", done.stderr
    assert done.stderr.count("records no trace any more") == 1
    assert joined(folder).named("kv_list")


def test_a_process_keeps_its_newest_spans(tmp_path: Path, client: tq.TransferQueueClient) -> None:
    folder = tmp_path / "trace"
    with tq.trace.start(folder, max_nbytes=1 << 15):
        done = 0

        def files() -> int:
            return len(list(folder.glob("*.before.jsonl")))

        def enough() -> bool:
            nonlocal done
            client.get_partition(f"part-{done}")
            done += 1
            return files() == 1 and '"lost"' in text_of(folder)

        until(enough, "a second change of files")
        client.get_partition("the last one")
    assert sum(file.stat().st_size for file in folder.glob("*")) < (1 << 15) + (1 << 15)
    found = joined(folder)
    assert found.named("get_partition")[-1]["args"]["partition"] == "the last one"
    assert found.about["spans_lost"] == done + 1 - len(found.named("get_partition"))
    assert found.names["process_labels", os.getpid(), 0] == f"{found.about['spans_lost']} spans lost"


def test_names_of_any_kind_stay_what_they_are(folder: Path, client: tq.TransferQueueClient) -> None:
    name = '"},</script>\u202e\x00\x1b[31m\n' + "ü" * 300
    tq.kv_put(name, name, {"x": torch.zeros(3)})
    tq.kv_batch_get([name], name)
    found = joined(folder)
    assert [one["args"]["partition"] for one in found.slices] == [name, name]
    assert len(found.named("kv_batch_get")[0]["args"]["keys"][0]) == 128
    assert list(found.flows) == ["row 0"]


def test_what_is_awaited_side_by_side_has_tracks_of_its_own(folder: Path, client: tq.TransferQueueClient) -> None:
    async def both() -> None:
        waits = [client.async_get_meta(["x"], 1, "p", task_name=task) for task in ("a", "b", "c")]
        await asyncio.gather(*waits, client.async_put({"x": [1]}, partition_id="p"))

    asyncio.run(both())
    found = joined(folder)
    tracks = {one["tid"] for one in found.slices}
    assert len(tracks) == 4
    assert {found.names["thread_name", os.getpid(), tid] for tid in tracks} == {
        f"MainThread, awaited {n}" for n in (1, 2, 3, 4)
    }
    assert len(found.named("get_meta")) == 3


def test_a_program_records_a_part_of_itself(tmp_path: Path, client: tq.TransferQueueClient) -> None:
    with tq.trace.start(tmp_path / "run.json", name="rollout"):
        assert os.environ["TQ_TRACE"] == str(tmp_path / "run.json")
        client.put({"x": [1]}, partition_id="within")
    assert "TQ_TRACE" not in os.environ
    client.put({"x": [1]}, partition_id="after")
    done = command(str(tmp_path / "run.json"), "-o", str(tmp_path / "out.json"))
    assert done.stdout == f"{tmp_path / 'out.json'}: 1 processes, 1 spans, 0 flows\n"
    found = Timeline(tmp_path / "out.json")
    assert found.named("put")[0]["args"]["partition"] == "within"
    assert found.names["process_name", os.getpid(), 0].startswith("rollout (")


def test_only_the_last_seconds_are_kept(folder: Path, client: tq.TransferQueueClient) -> None:
    client.put({"x": [1]}, partition_id="p")
    with pytest.raises(DeadlineExceeded):
        client.get_meta(["none"], 1, "p", task_name="t", timeout_s=0.3)
    client.put({"x": [1]}, partition_id="p")
    assert [one["name"] for one in joined(folder, "--since", "0.2").slices] == ["get_meta", "parked", "put"]


def test_nobody_looks_at_an_operation_without_a_trace(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer_queue.client.recording.OperationNote.__init__", None)
    client.put({"x": [1]}, partition_id="p")
    assert [len(data) for data in tq.stream("p", ["x"], task="t", batch_size=1)] == [1]


def test_arguments_that_are_none_are_refused(tmp_path: Path) -> None:
    for wrong in ({}, {"path": ""}, {"path": 7}, {"path": tmp_path, "max_nbytes": 1}):
        with pytest.raises(InvalidInput):
            tq.trace.start(**wrong)  # type: ignore[arg-type]
    missing = command(str(tmp_path / "nowhere"))
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
    assert "is no folder of a trace" in missing.stderr
    (tmp_path / "empty").mkdir()
    assert "has no trace that could be read" in command(str(tmp_path / "empty")).stderr


def test_a_version_of_the_weights_is_followed_to_its_commit(folder: Path, child: Start) -> None:
    child("""
        import torch
        from transfer_queue.weights import Control, ModuleSource, Receiver, Swap
        from transfer_queue.weights.transport import registry
        receiver = Receiver(Swap(torch.nn.Linear(4, 4)))
        control = Control(registry.engine("shm")(receiver), receiver)
        source = ModuleSource(torch.nn.Linear(4, 4))
        trainer = registry.trainer("shm").trainer_init({"run_id": "run-1"}, client=control, source=source)
        trainer.send_weights(deadline_s=20)
        trainer.shutdown()
        control.shutdown_weight_transfer_engine()
    """).finish()  # fmt: skip
    found = joined(folder)
    (send,) = found.named("send_weights")
    assert send["args"] == {"version": "1 of run-1", "bytes": 80}
    assert found.ways() == {"1 of run-1": ["send_weights", "fetch_weights", "commit_weights"]}
    assert {one["cat"] for one in found.slices} == {"weights"}
