"""`tools/matrix.py`: what it installs, which Pythons it finds, and how it reads a report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import environments, matrix

REPORT = """<testsuites>
<testsuite tests="9" failures="1" errors="2" skipped="3"/><testsuite tests="1" failures="0" errors="0" skipped="0"/>
</testsuites>"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no reader of TOML to compare with")
def test_requirements_are_those_of_the_project() -> None:
    import tomllib

    project = tomllib.loads((matrix.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    found = environments.requirements("dependencies", "dev", "demo")
    assert sorted(found) == sorted(project["dependencies"] + extras["dev"] + extras["demo"])


def test_every_python_of_the_matrix_is_one_that_the_project_names() -> None:
    text = (matrix.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert [version for version in matrix.PYTHONS if f'"Programming Language :: Python :: {version}"' not in text] == []


def test_a_report_is_counted_over_its_suites(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert matrix.counts(tmp_path / "report.xml") == (10, 3, 3)


def test_a_python_that_is_not_there_is_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not run: there is no such Python" in matrix.row("3.12", "newest", tmp_path, []).line()


def test_a_row_without_tests_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(matrix, "row", lambda *_: matrix.Row(python="3.12", note="not run: no reason"))
    assert matrix.main(["--python", "3.12", "--tensordict", "newest"]) == 1
    assert "| 3.12 | - | - | not run: no reason |" in capsys.readouterr().out


def test_what_is_no_option_goes_to_pytest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: list[object] = []
    monkeypatch.setattr(matrix, "row", lambda *rest: given.append(rest[3]) or matrix.Row(python=rest[0], passed=1))
    assert matrix.main(["--python", "3.10", "--tensordict", "oldest", "tests/test_kv.py", "-k", "put"]) == 0
    assert given == [["tests/test_kv.py", "-k", "put"]]
    assert "| 3.10 | - | - | 1 | 0 | 0 | 0 |" in capsys.readouterr().out
