"""Forked children are processes like others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from zygote import CHILDREN


def test_a_child_ends_with_its_own_status_and_its_exit_functions() -> None:
    code = "import atexit, sys; atexit.register(print, 'bye'); print(sys.argv[1:]); sys.exit(3)"
    done = CHILDREN.run(["-c", code, "a", "b"], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (3, "['a', 'b']\nbye\n", "")


def test_an_error_goes_to_its_standard_error() -> None:
    done = CHILDREN.run(["-c", "1 / 0"], os.environ)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_nothing_is_left_of_a_child_that_was_killed() -> None:
    child = CHILDREN.start(["-c", "input()"], os.environ)
    assert child.poll() is None
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(child.pid)
    child.stdin.close()
    child.stdout.close()


@pytest.mark.parametrize("command", [["-m", "program"], ["program.py"]])
def test_a_program_is_the_main_module_with_an_environment_of_its_own(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "program.py").write_text(
        "import __main__, os\nprint(__name__, __main__.__file__, dict(os.environ), os.getcwd())\n"
    )
    done = CHILDREN.run(command, {"ONLY": "this"}, str(tmp_path))
    assert done.stdout == f"__main__ {tmp_path}/program.py {{'ONLY': 'this'}} {tmp_path}\n", done.stderr


def test_a_child_has_the_descriptors_that_it_is_given_under_their_numbers(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w") as first, open(tmp_path / "b", "w") as second:
        given = (second.fileno(), first.fileno())
        code = "import os, sys; [os.write(int(number), number.encode()) for number in sys.argv[1:]]"
        child = CHILDREN.start(["-c", code, *map(str, given)], os.environ, pass_fds=given)
        child.stdin.close()
        with child.stdout:
            assert child.wait() == 0
        assert (tmp_path / "a").read_text() == str(first.fileno())
        assert (tmp_path / "b").read_text() == str(second.fileno())
