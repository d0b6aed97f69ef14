"""The documentation is complete: every setting, every error, every public name and every package has its place."""

from __future__ import annotations

import ast
import builtins
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from paths import ROOT

import transfer_queue as tq
from tools import settings as page
from transfer_queue import config, errors, weights
from transfer_queue.cli import COMMANDS
from transfer_queue.errors import TransferQueueError
from transfer_queue.sampler import _BUILT_IN as SAMPLERS
from transfer_queue.storage.engines.engine import BUILT_IN

PACKAGE = Path(tq.__file__).parent
FOUND = [one for one in page.settings(page.SOURCE.read_text(encoding="utf-8")) if not one.is_kept]
UNCHECKED = {  # any text is one, or the service fills it in
    "metrics.host", "metrics.endpoint", "controller.zmq_info", "backend.SimpleStorage.arena_dir", "server.host",
    "run_dir", "address",
}  # fmt: skip
WRONG = {"server.token_file": "/nowhere", "server.unit_token_file": "/nowhere", "server.join": "unix:/nowhere"}


def of_docs(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_page_of_settings_is_what_the_settings_say() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run tools/settings.py"


def test_a_comment_that_goes_on_below_its_setting_is_refused() -> None:
    text = "Store:\n  address: null  # of the cluster, else\n                 # that of this host\n  durable: false\n"
    with pytest.raises(ValueError, match="address: null"):
        list(page.settings(text))


def test_every_backend_of_ours_is_named_where_one_is_chosen() -> None:
    (chosen,) = [one.meaning for one in FOUND if one.name == "backend.storage_backend"]
    assert [name for name in BUILT_IN if name not in chosen] == []


def test_every_setting_has_a_type_and_a_meaning() -> None:
    assert {one.name for one in FOUND} == set(page.KINDS)
    assert [one.name for one in FOUND if not one.meaning] == []


@pytest.mark.parametrize("name", sorted(page.KINDS.keys() - UNCHECKED))
def test_a_value_of_another_type_is_refused_by_the_name_of_its_setting(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "server.unit_token_file":  # it is looked at where a server listens
        monkeypatch.setenv("TQ_TOKEN", "0123456789abcdef")
    conf = config.merged({"server": {"join": "tcp:127.0.0.1:1"}} if "token" in name else None)
    *sections, last = name.split(".")
    section = conf
    for one in sections:
        section = section[one]
    section[last] = WRONG.get(name, -1.5)
    with pytest.raises(TransferQueueError, match=last):
        config.server_config(conf, "", 0)


def test_every_environment_variable_of_the_package_is_on_the_page() -> None:
    read = {
        name
        for file in PACKAGE.rglob("*.py")
        for name in re.findall(r'["\'](TQ_[A-Z_]+)["\']', file.read_text(encoding="utf-8"))
    }
    told = set(re.findall(r"^\| `(TQ_[A-Z_]+)`", of_docs("settings.md"), re.MULTILINE))
    assert told == read == set(config.VARIABLES)


def test_every_error_has_an_entry_in_troubleshooting() -> None:
    headings = re.findall(r"^### (\w+)", of_docs("troubleshooting.md"), re.MULTILINE)
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, TransferQueueError)]
    assert sorted(headings) == sorted({one.__name__ for one in classes})


def test_the_messages_in_troubleshooting_are_those_of_the_package() -> None:
    source = "\n".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    rows = re.findall(r"^\| (`.*?`) \|", of_docs("troubleshooting.md"), re.MULTILINE)
    told = [part for row in rows for part in re.findall(r"`(.*?)`", row)]
    assert len(told) > 30
    assert [part for part in told if part not in source] == []


def test_every_entry_of_troubleshooting_says_what_it_means_why_it_comes_and_what_to_do() -> None:
    entries = re.split(r"^### ", of_docs("troubleshooting.md"), flags=re.MULTILINE)[1:]
    for entry in entries:
        for part in ("**Means.**", "**Cause.**", "**Do.**"):
            assert part in entry, entry.splitlines()[0]


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: transfer_queue\.(\w+)$", pages, re.MULTILINE))
    whole = {name for name in tq.__all__ if hasattr(errors, name)}
    assert shown | whole >= set(tq.__all__)
    assert "::: transfer_queue.errors" in pages
    assert "::: transfer_queue.weights\n" in pages  # all of its names
    assert weights.__all__


def test_every_command_is_on_its_page() -> None:
    text = of_docs("cli.md")
    sections = re.findall(r"^## `tq ([\w-]+)`", text, re.MULTILINE)
    assert sorted([*sections, "dead"]) == sorted(COMMANDS)


@pytest.mark.parametrize("place", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_package_is_on_the_map(place: str) -> None:
    text = (ROOT / place).read_text(encoding="utf-8")
    packages = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/__init__.py")}
    assert [name for name in sorted(packages) if f"`{name}" not in text] == []


WAITS = {"admit", "async_claim", "claim", "fetch", "get_meta", "open_partition", "select", "take", "tickets"}


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_waits_of_an_example_for_others_have_deadlines_of_their_own(example: Path) -> None:
    """The default of 30 s is less than a step of training takes."""
    text = example.read_text(encoding="utf-8")
    if not re.search(r"^(import threading|from multiprocessing)", text, re.MULTILINE):
        return  # nobody to wait for
    calls = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Call)]
    waits = [one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr in WAITS]
    without = [one.lineno for one in waits if "timeout_s" not in {given.arg for given in one.keywords}]
    assert without == []


def of_make(text: str) -> set[str]:
    """What a text tells to make, in its code."""
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    found = [re.findall(r"^make (?!ARGS)([\w-]+)", block, re.MULTILINE) for block in blocks]
    return set(sum(found, re.findall(r"`make ([\w-]+)", text)))


def test_what_pages_and_tools_tell_to_make_has_a_rule() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.py")]
    told = set().union(*(of_make(page.read_text(encoding="utf-8")) for page in pages))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    told.update(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split())  # which succeed without one
    rules = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    assert len(told) > 10
    assert told <= rules


def test_every_test_that_the_guarantees_name_is_there() -> None:
    files = {path.name: path for path in (ROOT / "tests").rglob("*.py")}
    missing, file = [], ""
    for named in re.findall(r"`((?:\w+\.py)?(?:::\w+)?)`", of_docs("guarantees.md")):
        file, name = named.split("::")[0] or file, named.partition("::")[2]
        text = files[file].read_text(encoding="utf-8") if file in files else ""
        if not text or not re.search(rf"^((async )?def {name}\(|{name} =)" if name else "", text, re.MULTILINE):
            missing.append(named)
    assert missing == []


def test_no_row_of_a_table_is_cut_off() -> None:
    """Rows behind a blank line are no table: a table has its line of dashes."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    blocks = [(page.name, block) for page in pages for block in re.split(r"\n\s*\n", page.read_text(encoding="utf-8"))]
    tables = [(page, block) for page, block in blocks if block.startswith("| ")]
    assert len(tables) > 20
    assert [
        (page, block[:60]) for page, block in tables if not re.search(r"^\|( ?:?-+:? ?\|)+$", block, re.MULTILINE)
    ] == []


def test_the_layers_of_packages_are_those_that_the_linter_keeps() -> None:
    linted = re.search(r"^layers = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S)
    assert linted
    layers = [re.findall(r"\w+", line) for line in linted[1].strip().splitlines()]
    told = re.search(r"^## Packages\n\n.*?\n\n((?:    [^\n]*\n)+)", of_docs("concepts.md"), re.M | re.S)
    assert told
    assert [line.strip().split(", ") for line in told[1].strip().splitlines()] == layers


def test_every_sampler_is_in_its_tutorial() -> None:
    assert [name for name in SAMPLERS if f"`{name}`" not in of_docs("tutorials/05_your_own_sampler.md")] == []


def test_every_page_with_code_that_can_run_is_run_by_make_check() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    run = re.findall(r"tools/readme.py (.*)", makefile)[0].split()
    pages = [page.relative_to(ROOT) for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    with_code = [page for page in pages if "\n```python\n" in (ROOT / page).read_text(encoding="utf-8")]
    assert len(with_code) > 10
    assert [page for page in with_code if not any(fnmatch(str(page), one) for one in run)] == []


def test_the_page_of_weights_says_where_each_name_of_its_code_comes_from() -> None:
    of_the_reader = {
        "bytes_of", "dist", "draft", "model", "module", "rank", "send", "token", "url_a", "url_b", "url_c", "x",
    }  # fmt: skip
    used, known = set[str](), of_the_reader | set(dir(builtins))
    for code in re.findall(r"^```py\n(.*?)^```", of_docs("weights.md"), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom):
                known |= {one.name for one in node.names}
                if (node.module or "").startswith("transfer_queue.weights"):
                    exec(ast.unparse(node), {})
            elif isinstance(node, ast.Import):
                known |= {(one.asname or one.name).split(".")[0] for one in node.names}
            elif isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else known).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                known.add(node.name)
            elif isinstance(node, ast.arg):
                known.add(node.arg)
    assert used - known == set()


def test_modules_that_the_pages_name_are_there() -> None:
    named = {
        found
        for page in (ROOT / "docs").rglob("*.md")
        for found in re.findall(
            r"[`# ]((?:transfer_queue\.)?(?:weights|integrations)(?:\.\w+)+)", page.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 5
    missing = [one for one in sorted(named) if not _is_there(f"transfer_queue.{one.removeprefix('transfer_queue.')}")]
    assert missing == []


def _is_there(name: str) -> bool:
    """A module, or a name in one. No framework need be installed, so the last part is looked for in the text."""
    path = PACKAGE.parent / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    home = path.parent / "__init__.py" if path.parent.is_dir() else path.parent.with_suffix(".py")
    return home.is_file() and re.search(rf"\b{path.name}\b", home.read_text(encoding="utf-8")) is not None
