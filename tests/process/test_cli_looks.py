"""The commands of `tq` that show a service: what they say, to people and as JSON, and what they never do."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CODE, ENVIRONMENT, ESCAPES, Terminal, served, tq
from conftest import Child, freeze, until
from zygote import CHILDREN

import transfer_queue
from transfer_queue.cli import COMMANDS
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.weights.fleet import ReplicaStatus

HOSTILE = "\x1b[31mevil\x1b]0;title\x07\u202e\x9b2J\n[bold]"
CONTROL = {chr(number) for number in (*range(32), 127, *range(128, 160), 0x202E)} - {"\n"}


@pytest.fixture(scope="module")
def filled(shared: transfer_queue.TransferQueueClient) -> Iterator[transfer_queue.TransferQueueClient]:
    """A service with some of everything: two partitions, a task with a lease and one that waits, a pool, a series."""
    transfer_queue.set_weight_version(1)
    transfer_queue.kv_batch_put(
        [f"k{number}" for number in range(12)],
        "train",
        {"x": torch.arange(36.0).view(12, 3), "text": ["hello " * (1 + 99 * number) for number in range(12)]},
        tags=[{"n": number, "weight_version": 1} for number in range(12)],
    )
    transfer_queue.kv_put("more", "train", {"y": torch.ones(2, dtype=torch.bfloat16)})
    transfer_queue.kv_put(HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, tag={HOSTILE: HOSTILE, "raw": b"\x1b[2J"})
    transfer_queue.set_weight_version(3)
    transfer_queue.group_pool("groups", transfer_queue.GroupPolicy()).open("g0", 2, source="math")
    transfer_queue.open_partition("step_0", "steps", 1, consumers=["actor"])
    shared.get_meta(["x"], 2, "train", task_name="actor")
    shared.get_meta(["x"], 3, "train", task_name="actor", lease_s=600)
    shared.nack(
        shared.get_meta(["x"], 1, "train", task_name="bad", lease_s=60, sampling_config={"max_deliver": 1}),
        reason=HOSTILE,
    )
    shared.report_replicas([
        ReplicaStatus("a", True, 3, "3", "", 1.0, 0.1),
        ReplicaStatus(HOSTILE, False, None, HOSTILE, HOSTILE, 1.0, None),
    ])  # fmt: skip
    waiting = threading.Thread(target=_wait_in_vain, args=(shared,))
    waiting.start()
    until(lambda: shared.overview().num_waits == 1, "a request that waits")
    yield shared
    shared.put({"x": torch.zeros(50, 3)}, partition_id="train")
    waiting.join(20)


def _wait_in_vain(client: transfer_queue.TransferQueueClient) -> None:
    client.get_meta(["x"], 40, "train", task_name="actor", timeout_s=3000)


def shown(*arguments: str) -> Any:
    """What a command says with --json."""
    done = tq(*arguments, "--json", "--address", transfer_queue.address())
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def told(*arguments: str, **environment: str) -> str:
    done = tq(*arguments, "--address", transfer_queue.address(), **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


LOOKS = {
    "status": ("status",),
    "ls": ("ls",),
    "keys": ("ls", "train"),
    "hostile keys": ("ls", HOSTILE),
    "inspect": ("inspect", "train", "k3"),
    "hostile row": ("inspect", HOSTILE, HOSTILE),
    "tasks": ("tasks",),
    "leases": ("leases",),
    "groups": ("groups",),
    "waits": ("waits",),
    "dead": ("dead", "train", "bad"),
    "replicas": ("replicas",),
    "top": ("top", "--once", "--interval", "0.1"),
}


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("what", LOOKS)
def test_nothing_that_a_terminal_acts_on_comes_from_a_name(what: str) -> None:
    assert not CONTROL & set(told(*LOOKS[what]))
    assert not CONTROL & set(json.dumps(shown(*LOOKS[what])))


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("what", LOOKS)
def test_on_a_narrow_terminal_no_line_is_longer(what: str) -> None:
    arguments = (*LOOKS[what], "--address", transfer_queue.address())
    with Terminal(*arguments, columns=80, NO_COLOR="1") as terminal:
        assert terminal.end() == 0
        lines = ESCAPES.sub("", terminal.text).replace("\r", "").split("\n")
    assert max(map(len, lines)) <= 80
    assert "\x1b[3" not in terminal.text  # a colour


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("what", "headings", "names"),
    [
        ("tasks", ("ready", "oldest", "leased", "kept", "consumed", "returned", "dead", "stale"), "partition +task"),
        ("groups", ("version", "running", "eligible", "tickets_out", "waiting", "failed_attempts"), "pool"),
    ],
)
def test_on_a_narrow_terminal_headings_are_whole_and_each_part_names_its_rows(
    what: str, headings: tuple[str, ...], names: str
) -> None:
    with Terminal(what, "--address", transfer_queue.address(), columns=80, NO_COLOR="1") as terminal:
        assert terminal.end() == 0
        lines = ESCAPES.sub("", terminal.text).replace("\r", "").split("\n")
    for heading in headings:
        assert any(re.search(rf"^{names} .* {heading}( |$)", line) for line in lines), heading


@pytest.mark.usefixtures("filled")
def test_into_a_pipe_a_row_is_a_line() -> None:
    rows = [line.split() for line in told("tasks").splitlines()]
    assert [row[:2] for row in rows] == [["partition", "task"], ["train", "actor"], ["train", "bad"]]


@pytest.mark.usefixtures("filled")
def test_a_dumb_terminal_gets_no_escapes() -> None:
    with Terminal("ls", "--address", transfer_queue.address(), TERM="dumb") as terminal:
        assert terminal.end() == 0
    assert "train" in terminal.text
    assert "\x1b" not in terminal.text


@pytest.mark.usefixtures("filled")
def test_partitions_are_listed_with_their_fields() -> None:
    found = {one["partition"]: one for one in shown("ls")}
    assert found["train"]["rows"] == 13
    assert found["train"]["fields"] == {"x": 12, "text": 12, "y": 1}
    assert found["train"]["tasks"] == ["actor", "bad"]
    assert "x (12), text (12), y (1)" in told("ls")


@pytest.mark.usefixtures("filled")
def test_keys_are_listed_a_page_at_a_time() -> None:
    found = shown("ls", "train", "--limit", "2", "--skip", "3")
    assert found["num_keys"] == 13
    assert [one["key"] for one in found["keys"]] == ["k3", "k4"]
    assert found["keys"][0]["tags"] == {"n": 3, "weight_version": 1}
    assert "2 of 13 keys; --skip 5 shows the next" in told("ls", "train", "--limit", "2", "--skip", "3")
    assert told("ls", "train", "--skip", "12").splitlines()[-1] == "1 of 13 keys"


def test_rows_without_a_key_are_counted_beside_the_keys(filled: transfer_queue.TransferQueueClient) -> None:
    filled.put({"x": torch.zeros(3, 1)}, partition_id="unnamed")
    assert (shown("ls", "unnamed")["num_keys"], shown("ls", "unnamed")["num_unnamed"]) == (0, 3)
    assert told("ls", "unnamed").splitlines()[-1] == "3 rows without a key"
    done = tq("tail", "unnamed", "--for", "0", "--address", transfer_queue.address())
    assert "3 of its rows have no key, and such rows are not followed" in done.stderr
    filled.clear_partition("unnamed")
    assert shown("ls", "train")["num_unnamed"] == 0


@pytest.mark.usefixtures("filled")
def test_who_works_on_siblings_is_shown() -> None:
    pool = transfer_queue.group_pool("groups")
    assert "worked on by" not in told("groups")
    attempts = pool.claim(2)
    assert f"pid {os.getpid()}" in told("groups")
    assert "oldest open group" in told("groups")
    found = shown("groups")["pools"]["groups"]
    assert (found["running"], [one["attempts"] for one in found["workers"]]) == (2, [2])
    pool.fail(attempts)
    assert shown("groups")["pools"]["groups"]["workers"] == []


@pytest.mark.usefixtures("filled")
def test_a_task_is_shown_with_what_it_has() -> None:
    actor, bad = shown("tasks")
    assert (actor["task"], actor["leased"], actor["consumed"]) == ("actor", 3, 2)
    assert actor["views"][0]["ready"] == 7
    assert (bad["task"], bad["dead"]) == ("bad", 1)


def test_rows_that_became_too_old_are_shown_with_their_partition(filled: transfer_queue.TransferQueueClient) -> None:
    transfer_queue.kv_put("old", "aged", {"x": torch.zeros(1)}, tag={"weight_version": 1})
    with pytest.raises(DeadlineExceeded):
        filled.get_meta(["x"], 1, "aged", task_name="actor", sampling_config={"max_staleness": 0}, timeout_s=0)
    partitions = shown("status")["partition"]
    assert [partitions[name]["stale"].get("actor") for name in ("aged", "train")] == [1, 0]
    assert "actor 1" in told("status")
    filled.clear_partition("aged")


def test_a_lease_is_shown_with_the_process_that_holds_it(filled: transfer_queue.TransferQueueClient) -> None:
    found = shown("leases")
    assert found["num_leases"] == 1
    assert found["leases"][0]["holders"] == [filled.session.ident.hex()]
    assert found["departures"] == []
    assert f"pid {os.getpid()}" in told("leases")


def test_what_a_client_had_that_ended_is_shown(
    filled: transfer_queue.TransferQueueClient, child: Callable[[str], Child]
) -> None:
    worker = child(
        """
        import transfer_queue as tq
        tq.init()
        tq.kv_put("a", "late", {"y": 1.0})
        tq.get_client().take("late", ["y"], 1, "judge", lease_s=60)
        print("taken", flush=True)
        input()
        """
    )
    assert worker.line() == "taken"
    worker.kill()
    until(lambda: shown("leases")["departures"], "the end of the session")
    (departure,) = shown("leases")["departures"]
    assert departure["pid"] == worker.pid
    assert [(one["partition"], one["task"], one["rows"]) for one in departure["given_back"]] == [("late", "judge", 1)]
    (line,) = [line for line in told("leases").splitlines() if "judge" in line]
    assert line.startswith(f"pid {worker.pid}")
    filled.clear_partition("late")


@pytest.mark.usefixtures("filled")
def test_a_request_that_waits_is_shown_with_what_it_lacks() -> None:
    found = shown("waits")
    assert found["num_waits"] == 1
    assert "7 ready" in found["waits"][0]["lacks"]
    assert "7 ready" in told("waits")
    assert shown("waits", "--limit", "0") == {"num_waits": 1, "waits": []}


@pytest.mark.usefixtures("filled")
def test_replicas_are_shown_with_the_weights_they_serve() -> None:
    a, b = shown("replicas")
    assert (a["name"], a["ready"], a["version"], b["ready"], b["reason"]) == ("a", True, 3, False, HOSTILE)
    assert f"pid {os.getpid()}" in told("replicas")


@pytest.mark.usefixtures("filled")
def test_pools_sources_and_series_are_shown() -> None:
    found = shown("groups")
    assert found["pools"]["groups"]["sources"]["math"]["starved_s"] >= 0
    assert found["series"]["steps"]["open"]["step_0"]["left"] == ["actor"]
    assert {"math", "step_0"} <= set(told("groups").split())


@pytest.mark.usefixtures("filled")
def test_a_row_is_shown_with_how_its_values_begin() -> None:
    found = shown("inspect", "train", "k3")
    assert found["values"]["x"] == "float32 [3] [9, 10, 11]"
    assert found["values"]["text"].endswith("…' (1,788 characters)")
    assert len(found["values"]["text"]) < 250
    assert (found["row"], found["age"], found["missing"]) == (3, 1, ["y"])
    assert {one["task"]: one["state"] for one in found["tasks"]} == {"actor": "leased", "bad": "ready"}
    assert found["events"][0]["what"] == "written"
    assert len(found["events"][0]["session"]) == 32
    by_row = shown("inspect", "train", "--row", "12", "--no-values")
    assert (by_row["key"], by_row["values"]) == ("more", {})


def test_a_pickled_value_is_not_evaluated(filled: transfer_queue.TransferQueueClient) -> None:
    filled.session.allow_pickle = True
    try:
        transfer_queue.kv_put("p", "pickled", {"x": Surprise()})
    finally:
        filled.session.allow_pickle = False
    assert shown("inspect", "pickled", "p")["values"]["x"].startswith("not read: ")
    assert not os.path.exists(Surprise.path)


@pytest.mark.usefixtures("filled")
def test_odd_values_say_what_they_are_beside_the_others() -> None:
    bits = torch.ones(3, dtype=torch.uint8).view(torch.bits8)
    transfer_queue.kv_put("o", "odd", {"bits": bits, "huge": 10**5000, "plain": "good"})
    found = shown("inspect", "odd", "o")["values"]
    assert found["bits"].startswith("cannot be shown: ")
    assert (found["huge"], found["plain"]) == ("<int of 16,610 bits>", "'good'")


class Surprise:
    """Makes a file where it is unpickled."""

    path = f"/tmp/tq-surprise-{os.getpid()}"

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.usefixtures("filled")
def test_dead_letters_have_a_short_name() -> None:
    assert shown("dead", "train", "bad") == shown("dead-letters", "train", "bad")
    assert shown("dead", "train", "bad")[0]["reason"] == HOSTILE


@pytest.mark.usefixtures("filled")
def test_dead_letters_of_a_task_that_is_not_there_name_those_that_are() -> None:
    assert shown("dead", "train", "actor") == []
    done = tq("dead", "train", "actr", "--address", transfer_queue.address())
    assert done.returncode == 1
    assert "task 'actr' never asked for rows of partition 'train'; the tasks that did: 'actor', 'bad'" in done.stderr


@pytest.mark.usefixtures("filled")
def test_one_frame_of_top_has_rates_and_who_waits() -> None:
    found = shown("top", "--once", "--interval", "0.1")
    assert found["rates"]["consumed"]["train"] == {"actor": 0.0, "bad": 0.0}
    assert found["overview"]["weight_version"] == 3
    text = told("top", "--once", "--interval", "0.1")
    assert "7 ready" in text
    assert "weights version 3" in text


def test_the_keys_of_a_large_partition_go_through_a_pipe(filled: transfer_queue.TransferQueueClient) -> None:
    keys = [f"key {number:05}" for number in range(10_000)]
    transfer_queue.kv_batch_put(keys, "large", {"x": torch.zeros(10_000)}, tags=[{"n": n} for n in range(10_000)])
    found = shown("ls", "large", "--limit", "20000")
    assert [one["key"] for one in found["keys"]] == keys
    command = [sys.executable, "-c", CODE, "ls", "large", "--limit", "20000", "--address", transfer_queue.address()]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().split() == [b"key", b"tags"]
        process.stdout.close()
        assert process.stderr.read() == b""
    filled.clear_partition("large")


@pytest.mark.usefixtures("filled")
def test_without_a_standard_output_nothing_is_said() -> None:
    command = [sys.executable, "-c", CODE, "ls", "--address", transfer_queue.address()]
    shell = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(shell, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class TestTail:
    """`tq tail`, in a process of its own."""

    @pytest.fixture
    def following(self, filled: transfer_queue.TransferQueueClient) -> Iterator[Any]:
        before = filled.overview().num_waits
        arguments = ["-c", CODE, "tail", "followed", "--json", "--address", transfer_queue.address()]
        process = CHILDREN.start(arguments, ENVIRONMENT, stderr=os.open(os.devnull, os.O_WRONLY))
        until(lambda: filled.overview().num_waits == before + 1, "its request")
        yield process
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()
        filled.clear_partition("followed")

    def test_follows_keys_and_tags(self, following: Any) -> None:
        transfer_queue.kv_put("a", "followed", {"x": torch.ones(1)}, tag={"n": 1})
        assert json.loads(following.stdout.readline()) == {"what": "new", "key": "a", "tags": {"n": 1}}
        transfer_queue.kv_put("a", "followed", tag={"n": 2})
        assert json.loads(following.stdout.readline()) == {"what": "tags", "key": "a", "tags": {"n": 2}}
        transfer_queue.kv_put("b", "followed", {"x": torch.ones(1)})
        assert json.loads(following.stdout.readline()) == {"what": "new", "key": "b", "tags": {}}
        transfer_queue.kv_clear("a", "followed")
        assert json.loads(following.stdout.readline())["what"] == "gone"

    def test_ends_with_ctrl_c(self, following: Any) -> None:
        following.send_signal(signal.SIGINT)
        assert following.wait(20) == 0


@pytest.mark.usefixtures("filled")
def test_tail_shows_what_happens_to_rows_without_a_key(tmp_path: Path) -> None:
    client = transfer_queue.get_client()
    arguments = ["-c", CODE, "tail", "events", "--events", "--json", "--address", transfer_queue.address()]
    with open(tmp_path / "said", "w") as said:
        process = CHILDREN.start(arguments, ENVIRONMENT, stderr=said.fileno())
    try:
        until(lambda: "following events" in (tmp_path / "said").read_text(), "its first question")
        client.put({"x": torch.zeros(3, 1)}, partition_id="events")
        client.get_meta(["x"], 2, "events", task_name="actor")
        written, taken = (json.loads(process.stdout.readline()) for _ in range(2))
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        process.stdin.close()
        process.stdout.close()
        client.clear_partition("events")
    assert (written["what"], written["rows"], written["detail"], written["of"]) == (
        "written", 3, "x", f"pid {os.getpid()}",
    )  # fmt: skip
    assert (taken["what"], taken["rows"], taken["task"], taken["first"]) == ("taken", 2, "actor", written["first"])


def test_tail_ends_in_time(filled: transfer_queue.TransferQueueClient) -> None:
    done = tq("tail", "train", "--for", "0.1", "--address", transfer_queue.address())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "following partition 'train'\n")
    hostile = tq("tail", HOSTILE + "x", "--for", "0", "--address", transfer_queue.address())
    assert not CONTROL & set(hostile.stderr)
    assert filled.overview().num_waits == 1


def test_a_checkpoint_is_saved_and_loaded(filled: transfer_queue.TransferQueueClient, tmp_path: Path) -> None:
    before = filled.stats()["rows"]
    saved = shown("checkpoint", "save", str(tmp_path / "saved"))
    assert saved["rows"] == before
    address = transfer_queue.address()
    refused = tq("checkpoint", "load", str(tmp_path / "saved"), "--address", address)
    assert (refused.returncode, "--replace" in refused.stderr) == (1, True)
    with served(str(tmp_path / "run")):
        loaded = tq("checkpoint", "load", str(tmp_path / "saved"), "--json", "--address", str(tmp_path / "run"))
        assert json.loads(loaded.stdout) == saved
        found = json.loads(tq("ls", "train", "--json", "--address", str(tmp_path / "run")).stdout)
        assert found["num_keys"] == 13


def test_long_work_has_a_bar_on_a_terminal(filled: transfer_queue.TransferQueueClient, tmp_path: Path) -> None:
    with Terminal("checkpoint", "save", str(tmp_path / "saved"), "--address", transfer_queue.address()) as terminal:
        assert terminal.end() == 0
    assert "saving" in terminal.text
    assert f"{filled.stats()['rows']:,} rows" in terminal.text.splitlines()[-1]


# errors and usage


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("ls", "no\x1b[2J"), "tq: partition 'no\\x1b[2J' does not exist: `tq ls` shows those that do"),
        (("inspect", "none", "k"), "tq: partition 'none' does not exist: `tq ls` shows those that do"),
        (("inspect", "trian", "k"), "tq: partition 'trian' does not exist; the nearest is 'train'"),
        (("dead", "none", "actor"), "tq: partition 'none' does not exist: `tq ls` shows those that do"),
        (("export", "none", "none.parquet"), "tq: partition 'none' does not exist: `tq ls` shows those that do"),
        (("inspect", "train", "none"), "tq: row 'none' is not in partition 'train'"),
        (("inspect", "train", "--row", str(1 << 70)), "tq: InspectRow: "),
        (("replay", "1", "--task", "actor"), "tq: "),
        (("checkpoint", "load", "/nowhere", "--replace"), "tq: /nowhere: no such directory"),
        (("checkpoint", "save", "/proc/1/no"), "tq: "),
    ],
)
def test_an_error_is_a_line_that_says_what_to_do(arguments: tuple[str, ...], text: str) -> None:
    failed = tq(*arguments, "--address", transfer_queue.address())
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith(text)
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "p"),
        ("inspect", "p", "k", "--row", "1"),
        ("nothing",),
        ("top", "--interval", "0"),
        ("ls", "--limit", "-1"),
    ],
)
def test_bad_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    failed = tq(*arguments, "--address", "unix:/nowhere")
    assert failed.returncode == 2
    assert "Error" in failed.stderr or "No such command" in failed.stderr


def test_the_only_service_is_found_and_several_are_listed(tmp_path: Path) -> None:
    code = (
        "from transfer_queue.server import host_registry; found = host_registry.running\n"
        f"host_registry.running = lambda: [entry for entry in found() if '{tmp_path}' in entry.address]\n"
    )
    find = ["-c", code + CODE, "ls", "--json"]
    none = CHILDREN.run(find, ENVIRONMENT)
    assert (none.returncode, none.stdout) == (1, "")
    assert "`tq serve`" in none.stderr
    with served(str(tmp_path / "one")):
        assert json.loads(CHILDREN.run(find, ENVIRONMENT).stdout) == []
        with served(str(tmp_path / "two")):
            several = CHILDREN.run(find, ENVIRONMENT)
    assert several.returncode == 1
    assert "2 services of this user run here, name one with --address" in several.stderr
    assert f"unix:{tmp_path}/two/tq.sock" in several.stderr


def test_a_frozen_service_is_told_of_in_time(tmp_path: Path) -> None:
    with served(str(tmp_path / "run")) as server:
        freeze(server.pid)
        failed = tq("ls", "--address", str(tmp_path / "run"))
        assert failed.returncode == 1
        assert "SIGCONT" in failed.stderr
        assert len(failed.stderr.splitlines()) == 1


def test_no_service_at_an_address_says_how_to_start_one() -> None:
    failed = tq("ls", "--address", "unix:/nowhere/tq.sock")
    assert failed.stderr.startswith("tq: no server at unix:/nowhere/tq.sock")
    assert "`tq serve`" in failed.stderr


# the start


def test_help_and_version_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, time\nfrom transfer_queue_doctor import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'msgspec', 'rich', 'omegaconf'} & set(sys.modules), sys.modules\n"
        "print(time.process_time())"
    )
    for option in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", code, option], env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.splitlines()[-1]) < 0.9  # 0.2 s where nobody else works


@pytest.mark.usefixtures("filled")
def test_commands_that_look_do_not_import_torch() -> None:
    code = "import sys\ntry: main()\nexcept SystemExit: assert 'torch' not in sys.modules"
    for arguments in (["status"], ["ls", "train"], ["tasks"], ["top", "--once", "--interval", "0.1"]):
        command = [sys.executable, "-c", CODE.replace("; main()", "\n") + code, *arguments]
        done = subprocess.run(
            [*command, "--address", transfer_queue.address()], env=ENVIRONMENT, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")


@functools.cache
def help_of(*command: str) -> str:
    return tq(*command, "--help").stdout


def test_every_command_is_in_the_help_and_explains_itself() -> None:
    text = help_of()
    assert [name for name in COMMANDS if f"\n  {name} " not in text] == []
    assert "..." not in text.partition("Commands:")[2]  # a line that was cut
    for name in COMMANDS:
        assert help_of(name).startswith(f"Usage: tq {name} ")


def test_every_command_that_shows_something_does_it_as_json() -> None:
    lacking = [name for name in COMMANDS if name not in ("serve", "checkpoint") and "--json" not in help_of(name)]
    assert lacking == []


def test_a_shell_completes_commands() -> None:
    done = tq(_TQ_COMPLETE="complete_bash", COMP_WORDS="tq le", COMP_CWORD="1")
    assert done.stdout.split() == ["leases"]
    assert "--show-completion" in help_of()
