"""Samplers of users: from entry points, from the script they run, and ones that fail."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import until
from paths import ROOT, SOURCES
from tables import Box
from test_standby import DURABLE, replaced, standby_of
from zygote import CHILDREN

import transfer_queue as tq
from transfer_queue.controller.sampler_calls import SamplerCalls
from transfer_queue.errors import ConfigError, InvalidInput, SamplerFailed, UnsupportedValue
from transfer_queue.sampler import BaseSampler, SequentialSampler, from_spec, resolve
from transfer_queue.wire import messages as m

Sampled = tuple[list[int], list[int]]

# ---- entry points ----


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, **points: str) -> None:
    """Lay out in `folder` what an installer leaves of a package that registers `points`."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{point} = {value}" for point, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[transfer_queue.samplers]", *lines, ""]))
    if str(folder) not in sys.path:
        monkeypatch.syspath_prepend(str(folder))


NEWEST = """
    from transfer_queue.sampler import BaseSampler

    class Newest(BaseSampler):
        def sample(self, ready_indexes, batch_size, *args, **kwargs):
            print("sampled")
            return ready_indexes[-batch_size:], ready_indexes[-batch_size:]

    print("imported")
"""


def test_a_registered_name_gives_the_installed_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: Callable[..., tq.TransferQueueClient]
) -> None:
    install(tmp_path, monkeypatch, "newest-rows", newest="newest_rows:Newest")
    (tmp_path / "newest_rows.py").write_text(textwrap.dedent(NEWEST))
    assert resolve("newest") == {"class": "newest_rows:Newest", "kwargs": {}}
    client = service(controller={"sampler": "newest"})
    rows = client.put({"x": [1, 2, 3]}, partition_id="p").global_indexes
    assert client.get_meta(["x"], 2, "p", task_name="t").global_indexes == rows[1:]


def test_a_built_in_name_cannot_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "taken", SequentialSampler="json:JSONDecoder")
    assert type(from_spec(resolve("SequentialSampler"))) is SequentialSampler


def test_a_name_registered_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "one", mine="one:Sampler")
    install(tmp_path, monkeypatch, "two", mine="two:Sampler")
    with pytest.raises(ConfigError, match=r"more than once.*one:Sampler.*two:Sampler"):
        resolve("mine")


def test_a_registered_class_that_is_missing_or_no_sampler_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "broken", missing="no_such_module_here:X", other="json:JSONDecoder")
    with pytest.raises(ConfigError, match="'missing' cannot be imported: ModuleNotFoundError"):
        resolve("missing")
    with pytest.raises(UnsupportedValue):
        resolve("other")


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "more", newest="newest_rows:Newest")
    with pytest.raises(ConfigError, match=r"GRPOGroupNSampler.*newest"):
        resolve("nope")


# ---- classes of the script ----


def run(*command: str, cwd: Path | None = None, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """A Python process that runs to its end; both its streams as text."""
    environment = {key: value for key, value in os.environ.items() if key != "TQ_ADDRESS"}
    environment["PYTHONPATH"] = SOURCES
    if command != ("-",):
        return CHILDREN.run(list(command), environment, str(cwd or ROOT))
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=cwd, input=text, capture_output=True, text=True, timeout=100
    )


CLASS = """
    import transfer_queue as tq
    from omegaconf import OmegaConf

    class MySampler(tq.BaseSampler):
        def __init__(self, skip):
            super().__init__()
            self.skip = skip

        def sample(self, ready_indexes, batch_size, *args, **kwargs):
            picked = ready_indexes[self.skip :][:batch_size]
            return picked, picked
"""
BODY = """
    tq.init(OmegaConf.create({"controller": {"sampler": MySampler(3)}}, flags={"allow_objects": True}))
    client = tq.get_client()
    client.put({"x": [10, 20, 30, 40, 50]}, partition_id="p")
    meta = client.get_meta(["x"], 2, "p", task_name="t")
    print(client.get_data(meta)["x"].tolist())
    tq.close()
"""


def script(path: Path, before: str = "", body: str = BODY, guard: bool = True) -> str:
    """Write a script with the class and, under the guard, `body`."""
    code = textwrap.dedent(before) + textwrap.dedent(CLASS)
    body = textwrap.dedent(body)
    path.write_text(code + ('if __name__ == "__main__":\n' + textwrap.indent(body, "    ") if guard else body))
    return str(path)


def test_a_class_of_the_users_script(tmp_path: Path) -> None:
    done = run(script(tmp_path / "train.py", before="import torch\nprint(torch.ones(1).sum().item(), __name__)\n"))
    assert (done.returncode, done.stdout) == (0, "1.0 __main__\n[40, 50]\n"), done.stderr
    assert "1.0 __mp_main__" in done.stderr


def test_a_class_of_a_script_run_from_another_directory_by_a_relative_path(tmp_path: Path) -> None:
    script(tmp_path / "train.py", body="import os\nos.chdir('/')\n" + textwrap.dedent(BODY))
    done = run("train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[40, 50]\n"), done.stderr


def test_a_class_of_a_module_run_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").write_text("")
    (tmp_path / "jobs" / "sizes.py").write_text("ROWS = 5\n")
    script(tmp_path / "jobs" / "train.py", before="from .sizes import ROWS\n")
    done = run("-m", "jobs.train", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[40, 50]\n"), done.stderr


SPAWNING = """
    from multiprocessing import get_context

    child = get_context("spawn").Process(target=work)
    child.start()
    child.join()
"""


def test_a_class_in_a_child_that_multiprocessing_spawned(tmp_path: Path) -> None:
    path = script(tmp_path / "train.py", body=SPAWNING)
    code = Path(path).read_text()
    work = "def work():\n" + textwrap.indent(textwrap.dedent(BODY), "    ")
    Path(path).write_text(code.replace("if __name__", f"{work}\nif __name__"))
    done = run(path)
    assert (done.returncode, done.stdout) == (0, "[40, 50]\n"), done.stderr


CAUGHT = """
    import time
    start = time.monotonic()
    try:
        tq.init({"controller": {"sampler": MySampler(3)}})
    except tq.errors.ConfigError as error:
        print(error)
    print(time.monotonic() - start < 25)
"""


@pytest.mark.parametrize(
    ("failing", "reason"),
    [
        ("raise RuntimeError('no such dataset')", "RuntimeError: no such dataset"),
        ("raise SystemExit('usage')", "SystemExit: usage"),
        ("import no_such_module_here", "ModuleNotFoundError: No module named 'no_such_module_here'"),
    ],
)
def test_a_script_that_fails_in_the_server_says_why_at_once(tmp_path: Path, failing: str, reason: str) -> None:
    before = f"import transfer_queue.errors\nif __name__ != '__main__':\n    {failing}\n"
    path = script(tmp_path / "train.py", before=before, body=CAUGHT)
    done = run(path)
    expected = f"sampler '__main__:MySampler' cannot be imported from {path}: {reason}\nTrue\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_a_script_without_the_guard_does_not_start_servers_without_end(tmp_path: Path) -> None:
    done = run(script(tmp_path / "train.py", guard=False))
    assert done.returncode == 1
    assert 'if __name__ == "__main__"' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", [["-c", textwrap.dedent(CLASS + BODY)], ["-"]])
def test_a_class_that_is_in_no_file_is_refused_with_what_to_do(command: list[str]) -> None:
    done = run(*command, text=textwrap.dedent(CLASS + BODY))
    assert done.returncode == 1
    assert "ConfigError: the sampler class MySampler is not in a file" in done.stderr
    assert "define it in an importable module" in done.stderr


def test_a_spec_of_the_main_script_runs_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    path = script(tmp_path / "train.py", before="import sys\nsys.modules.setdefault('runs', []).append(__name__)\n")
    monkeypatch.setitem(sys.modules, "runs", [])  # type: ignore[arg-type]
    spec = {"class": "__main__:MySampler", "main": path, "kwargs": {"skip": 1}}
    assert [from_spec(spec).sample([0, 1, 2], 1)[0] for _ in range(2)] == [[1], [1]]
    assert sys.modules["runs"] == ["__mp_main__"]
    monkeypatch.delitem(sys.modules, "__mp_main__")


def test_a_class_of_another_main_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Remembering, "__module__", "__main__")  # as a class that came by pickle
    for sampler in (Remembering, Remembering()):
        with pytest.raises(ConfigError, match="define it in an importable module"):
            resolve(sampler)


# ---- samplers that look around, and samplers that fail ----


class Remembering(BaseSampler):
    """Written for 0.1.11: its own signature, the shared cache, and tags of many rows at once."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, task_name: str = "", partition_id: str = "", *args: Any,
        **kwargs: Any,
    ) -> Sampled:  # fmt: skip
        ranks = self._states.setdefault(partition_id, {}).setdefault(task_name, {})
        batches = ranks.setdefault(kwargs["dp_rank"], {})
        if kwargs["batch_index"] not in batches:
            tags = kwargs["partition"].get_custom_meta(ready_indexes)
            good = [index for index in ready_indexes if tags.get(index, {}).get("good")][:batch_size]
            if len(good) < batch_size:
                return [], []
            batches[kwargs["batch_index"]] = (good, good)
        return batches[kwargs["batch_index"]]


class Failing(SequentialSampler):
    """Fails, or returns what makes no sense, when sampling_config says so."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        if "raises" in kwargs:
            raise {"os": OSError, "arithmetic": ZeroDivisionError, "own": Own}[kwargs["raises"]]("the reason")
        return kwargs.get("returns", super().sample(ready_indexes, batch_size))


class Own(Exception):
    pass


def test_a_sampler_sees_tags_and_its_results_are_remembered() -> None:
    box = Box(Remembering())
    box.put(4, tags=[{"good": True}, {}, {"good": False}, {"good": True}])
    assert box.fetch(2, dp_rank=0, batch_index=0) == [0, 3]
    assert box.fetch(2, dp_rank=0, batch_index=0) == [0, 3]
    assert box.consumed() == {0: 1, 1: 0, 2: 0, 3: 1}


def test_others_that_wait_for_a_remembered_result_of_a_users_sampler_get_it() -> None:
    box = Box(Remembering())
    for ticket in "ab":
        box.fetch(2, wait_s=9, ticket=ticket, dp_rank=0, batch_index=0)
    box.put(2, tags=[{"good": True}] * 2)
    assert box.answers() == [("a", [0, 1]), ("b", [0, 1])]


@pytest.mark.parametrize("raises", ["os", "arithmetic", "own"])
def test_whatever_a_sampler_raises_is_an_error_of_its_caller(raises: str) -> None:
    box = Box(Failing())
    box.put(2)
    with pytest.raises(SamplerFailed, match=r"Failing failed: .*the reason"):
        box.fetch(1, raises=raises)
    assert box.fetch(1) == [0]


def test_a_waiter_whose_sampling_fails_does_not_disturb_the_writer_or_other_waiters() -> None:
    box = Box(Failing())
    box.fetch(1, wait_s=9, ticket="bad", raises="own")
    box.fetch(1, wait_s=9, ticket="good")
    assert box.put(1) is not None
    answers = dict(box.answers())
    assert isinstance(answers["bad"], SamplerFailed)
    assert answers["good"] == [0]


@pytest.mark.parametrize("returns", [None, [1], 5, [["a"], []], [[0], [99]], [[99], []], [[[0]], [0, "x"]]])
def test_a_result_that_makes_no_sense_is_an_error_and_consumes_nothing(returns: Any) -> None:
    box = Box(Failing())
    box.put(1)
    with pytest.raises(SamplerFailed, match="Failing"):
        box.fetch(1, returns=returns)
    assert box.consumed() == {0: 0}


class Asking(SequentialSampler):
    def check_request(self, batch_size: int, sampling_config: Any) -> None:
        if "reason" not in sampling_config:
            raise InvalidInput("say why")
        sampling_config["reason"].upper()


def test_a_sampler_may_refuse_a_request_before_it_waits() -> None:
    box = Box(Asking())
    with pytest.raises(InvalidInput, match="say why"):
        box.fetch(1, wait_s=9, ticket="t")
    with pytest.raises(SamplerFailed, match="AttributeError"):
        box.fetch(1, wait_s=9, ticket="t", reason=5)
    assert box.controller.num_waiting == 0


def test_a_sampler_that_fails_leaves_the_connection_and_other_clients_alone(
    service: Callable[..., tq.TransferQueueClient], child: Callable[[str], Any]
) -> None:
    client = service(controller={"sampler": f"{__name__}:Failing"})
    client.put({"x": [1, 2]}, partition_id="p")
    other = child("""
        import transfer_queue as tq
        tq.init()
        meta = tq.get_client().get_meta(["x"], 3, "p", task_name="u", timeout_s=60)
        print(tq.get_client().get_data(meta)["x"].tolist())
        tq.close()
    """)
    until(lambda: client.stats()["waiting_requests"] == 1, "a waiting client")
    with pytest.raises(SamplerFailed, match=r"OSError: the reason"):
        client.get_meta(["x"], 1, "p", task_name="t", sampling_config={"raises": "os"})
    client.put({"x": [3]}, partition_id="p")
    assert other.finish() == "[1, 2, 3]"
    assert client.get_meta(["x"], 1, "p", task_name="t").size == 1


class Drawing(SequentialSampler):
    """Draws rows from the system's randomness, and remembers how many."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[int] = []

    def needs(self, batch_size: int) -> None:
        return None

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        rows = np.array(random.SystemRandom().sample(ready_indexes, batch_size))
        self.drawn += rows.tolist()
        return rows, rows

    def save_checkpoint(self) -> dict[str, Any]:
        return {**super().save_checkpoint(), "drawn": self.drawn}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        super().load_checkpoint(state)
        self.drawn = state["drawn"]


def test_after_a_takeover_rows_that_were_drawn_stay_drawn(service: Callable[..., tq.TransferQueueClient]) -> None:
    client = service(**DURABLE, controller={"sampler": f"{__name__}:Drawing"})
    rows = client.put({"x": torch.arange(20)}, partition_id="p").global_indexes
    standby_of(client)
    had = client.get_meta(["x"], 4, "p", task_name="t", lease_s=60)
    taken = list(had.global_indexes)
    for _ in range(2):
        taken += client.get_meta(["x"], 4, "p", task_name="t").global_indexes
    replaced(client)
    client.ack(had)
    _, used = client.get_consumption_status("t", "p")
    assert used.nonzero().flatten().tolist() == sorted(taken)
    taken += client.get_meta(["x"], 8, "p", task_name="t").global_indexes
    assert sorted(taken) == rows


class Odd(SequentialSampler):
    """Takes any key, and may need half a row."""

    def needs(self, batch_size: int) -> Any:
        return 1.5

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        return super().sample(ready_indexes, batch_size)


def test_a_sampler_that_needs_half_a_row_has_failed_for_its_asker_alone() -> None:
    box = Box(Odd())
    box.fetch(1, wait_s=9, ticket="waiting")
    box.put(2)
    assert isinstance(dict(box.answers())["waiting"], SamplerFailed)
    with pytest.raises(SamplerFailed, match=r"Odd answered 1\.5"):
        box.fetch(1)


@pytest.mark.parametrize("key", ["question", "news", "answer", "read"])
def test_a_key_of_a_users_sampler_may_have_any_name(key: str) -> None:
    box = Box(Failing())
    box.put(2)
    assert box.fetch(1, **{key: 1}) == [0]


def test_a_key_that_python_calls_the_sampler_by_is_an_error_of_its_asker() -> None:
    box = Box(Failing())
    box.put(2)
    with pytest.raises(SamplerFailed):
        box.handle(m.Fetch(1, "p", ["a"], 1, "t", {"self": 1}, 0.0, False))


def test_what_a_foreign_sampler_answers_is_not_kept_without_a_standby() -> None:
    box = Box(Drawing())
    box.put(10)
    box.fetch(3)
    assert box.controller.state.fetching.calls._heard == []


def test_a_standby_takes_what_a_foreign_sampler_answered_and_remembers() -> None:
    first, heir = SamplerCalls(Drawing()), SamplerCalls(Drawing())
    assert first.keep()
    assert heir.keep()
    heir.begin_again()
    drawn = first.ask(first.sampler.sample, list(range(1000)), 3)
    with pytest.raises(SamplerFailed):
        first.ask(first.sampler.sample, [], 3)
    heard = first.heard()
    assert heard is not None
    assert first.heard() is None
    heir.repeat(heard)
    assert heir.ask(heir.sampler.sample, list(range(1000)), 3) == drawn
    with pytest.raises(SamplerFailed, match="Sample larger"):
        heir.ask(heir.sampler.sample, [], 3)
    with pytest.raises(KeyError):
        heir.ask(heir.sampler.sample, [1], 1)
    heir.end_again()
    assert heir.sampler.drawn == first.sampler.drawn == drawn[0]  # type: ignore[attr-defined]


def test_what_happens_once_more_has_to_be_what_happened() -> None:
    calls = SamplerCalls(Drawing())
    assert calls.keep()
    calls.ask(calls.sampler.least_ready, 3)
    heard = calls.heard()
    assert heard is not None
    calls.begin_again()
    calls.repeat(heard)
    with pytest.raises(KeyError, match="1 answers of Drawing that nobody asked for"):
        calls.end_again()
