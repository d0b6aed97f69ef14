"""How many processors a process may use, by what the kernel says of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transfer_queue.memory.processors import usable_processors


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(64)))
    (tmp_path / "groups").mkdir()
    return tmp_path


def usable(kernel: Path, mine: str) -> float:
    (kernel / "mine").write_text(mine)
    return usable_processors(kernel / "groups", kernel / "mine")


def write(kernel: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = kernel / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_without_a_quota_they_are_those_that_it_may_run_on(kernel: Path) -> None:
    write(
        kernel, {"a/cpu.max": "max 100000\n", "cpu/b/cpu.cfs_quota_us": "-1\n", "cpu/b/cpu.cfs_period_us": "100000\n"}
    )
    assert usable(kernel, "0::/a\n") == 64
    assert usable(kernel, "4:cpu,cpuacct:/b\n0::/\n") == 64


def test_a_quota_counts_of_whichever_group_is_tightest(kernel: Path) -> None:
    write(kernel, {"pod/cpu.max": "150000 100000\n", "pod/main/cpu.max": "800000 100000\n"})
    assert usable(kernel, "0::/pod/main\n") == 1.5


def test_a_quota_counts_in_the_first_version_of_control_groups(kernel: Path) -> None:
    write(kernel, {"cpu/x/cpu.cfs_quota_us": "200000\n", "cpu/x/cpu.cfs_period_us": "100000\n"})
    assert usable(kernel, "3:cpuset:/y\n4:cpu,cpuacct:/x\n") == 2


def test_a_group_by_its_name_outside_of_the_container_has_its_limits_at_the_top(kernel: Path) -> None:
    write(kernel, {"cpu.max": "100000 100000\n"})
    assert usable(kernel, "0::/kubepods/pod1\n") == 1


@pytest.mark.parametrize("files", [{}, {"cpu.max": "nonsense"}, {"cpu.max": "1 0"}, {"cpu.max": ""}])
def test_what_cannot_be_read_is_no_limit(kernel: Path, files: dict[str, str]) -> None:
    write(kernel, files)
    assert usable(kernel, "0::/\n") == 64
    assert usable_processors(kernel / "groups", kernel / "missing") == 64


def test_here_there_is_at_least_some_of_one() -> None:
    assert 0 < usable_processors() <= (os.cpu_count() or 1)
