"""`tools/house.py` and `tools/entered.py`: each figure on a small package that has what the figure counts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import entered, house

Package = Callable[..., Path]


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """Writes a package: the name, then each module's code."""

    def write(name: str, **modules: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for module, code in {"__init__": "", **modules}.items():
            (folder / f"{module}.py").write_text(textwrap.dedent(code))
        return folder

    return write


def kept(package: Package, code: str) -> float:
    return house.kept_errors(house.sources(package("errors_are_kept", one=code))).value


def test_the_longest_file_and_function_are_found(package: Package) -> None:
    long = "def f():\n" + "    pass\n" * 70
    found = house.sources(package("sizes", one=long, two="def g():\n    pass\n" * 300))
    file, function, median, most = house.sizes(found, found)
    assert (file.value, function.value, median.value, most.value) == (600, 71, 2, 2)
    assert [place.rpartition("/")[2] for place in function.places] == ["one.py:1 f: 71"]
    assert function.is_worse()
    assert not file.is_worse()


def test_a_name_of_two_classes_is_counted_once(package: Package) -> None:
    two = "def f():\n    class A: ..."
    found = house.shared_class_names(house.sources(package("names", one="class A: ...\nclass B: ...", two=two)), {})
    assert found.value == 1
    assert found.places[0].startswith("A: ")


def test_an_allowed_name_is_not_counted(package: Package) -> None:
    found = house.sources(package("names_allowed", one="class A: ...", two="class A: ..."))
    assert house.shared_class_names(found, {"A": "a protocol"}).value == 0


def test_an_exception_that_nothing_needs_is_counted(package: Package) -> None:
    found = house.sources(package("names_unused", one="class A: ..."))
    assert house.shared_class_names(found, {"A": "a protocol"}).value == 1


@pytest.mark.parametrize(
    "handler",
    [
        "except Exception: pass",
        "except BaseException: pass",
        "except: pass",
        "except (ValueError, Exception): pass",
        "except Exception as error:\n    if error.args: raise",
        "except Exception as error:\n    if error.args: raise\n    else: print(error)",
        "except Exception as error:\n    def later(): raise error",
    ],
)
def test_a_broad_except_with_a_way_that_does_not_raise_keeps_an_error(package: Package, handler: str) -> None:
    assert kept(package, f"try: print()\n{handler}") == 1


@pytest.mark.parametrize(
    "handler",
    [
        "except ValueError: pass",
        "except Exception:\n    print()\n    raise",
        "except Exception as error: raise KeyError from error",
        "except Exception as error:\n    if error.args: raise\n    else: raise KeyError",
        "except Exception as error: answer = generator.throw(error)",
        "except Exception:\n    try: print()\n    finally: raise",
    ],
)
def test_an_except_that_is_narrow_or_always_raises_keeps_none(package: Package, handler: str) -> None:
    assert kept(package, f"try: print()\n{handler}") == 0


def test_suppressing_every_error_is_keeping_one(package: Package) -> None:
    code = "with contextlib.suppress(Exception): ...\nwith contextlib.suppress(ValueError): ..."
    assert kept(package, code) == 1


def test_imports_for_types_and_in_functions_close_a_cycle(package: Package) -> None:
    folder = package(
        "turning",
        one="from turning import two",
        two="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from turning import three",
        three="def f():\n    from turning import one",
        four="from turning import one",
    )
    found = house.cycles(folder)
    assert found.value == 1
    assert found.places[0] == "turning.one <-> turning.three <-> turning.two"
    assert "  turning.two imports turning.three (for types)" in found.places


def test_imports_that_go_down_are_no_cycle(package: Package) -> None:
    assert (
        house.cycles(
            package("falling", one="from falling import two, three", two="import falling.three", three="")
        ).value
        == 0
    )


def test_branches_are_those_of_the_function_alone() -> None:
    code = """
    def outer(x):
        def inner():
            if x: ...
        while x:
            try: ...
            except ValueError: ...
        return 1 if x else [y for y in x if y]
    """
    tree = entered.ast.parse(textwrap.dedent(code))
    assert entered.own_branches(tree.body[0]) == 3


def test_only_what_every_put_calls_counts() -> None:
    notes = ["1.5\t1\t/a.py", "1.6\t9\t/b.py", "2.5\t1\t/a.py", "3.5\t1\t/a.py", "3.6\t9\t/b.py"]
    assert entered.common(notes, [(1, 2), (2, 3)]) == {Path("/a.py"): {1}}


def test_functions_are_found_in_the_client_and_in_the_process_that_it_starts(package: Package) -> None:
    folder = package(
        "walked",
        here="import functools\n@functools.cache\ndef ask(x):\n    if x: return 1\n    return 2",
        there="def answer():\n    return 3",
        never="def other():\n    if 1: ...",
    )
    client = """if True:
        import json, subprocess, sys, time
        from walked import here, never
        spans = []
        for number in range(3):
            start = time.monotonic()
            here.ask(number)
            subprocess.run([sys.executable, "-c", "from walked import there; there.answer()"], check=True)
            spans.append((start, time.monotonic()))
        print(json.dumps(spans))
    """
    found = entered.Run(folder, client).result()
    assert found == [entered.Entered("here.py", 1, ("ask",)), entered.Entered("there.py", 0, ("answer",))]


def test_a_client_that_fails_is_no_figure(package: Package) -> None:
    with pytest.raises(RuntimeError, match="ended with status 1"):
        entered.Run(package("failing"), "raise SystemExit(1)").result()


@pytest.fixture
def small(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of all code that there is, and of the put that is measured: `make check` looks at those."""
    twice = "".join(f"class {name}: ...\n" for name in house.SHARED_NAMES)
    monkeypatch.setattr(house, "PACKAGE", package("small", one=f"{twice}def f(): ...", two=twice))
    monkeypatch.setattr(house, "other_folders", list)
    monkeypatch.setattr(entered, "Run", lambda: SimpleNamespace(result=list))


@pytest.mark.usefixtures("small")
def test_every_figure_has_a_limit_and_every_limit_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert not house.main([])
    assert {line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()} == set(house.LIMITS)


@pytest.mark.usefixtures("small")
def test_a_figure_that_is_worse_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    worse = {name: limit._replace(ceiling=-1) for name, limit in house.LIMITS.items()}
    monkeypatch.setattr(house, "LIMITS", worse)
    assert house.main([])
    assert capsys.readouterr().out.count("WORSE") == len(worse)
