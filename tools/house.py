"""Prints the figures of the house, and fails where one is worse than its ceiling in `LIMITS`. `make check` runs it.

A ceiling is today's figure until the goal beside it is met, so that nothing gets worse on the way. `--places` prints
where each figure comes from also where it keeps within its ceiling.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grimp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a file, its own folder comes first
from tools import entered  # noqa: E402

PACKAGE = entered.PACKAGE
OUTPUTS = {"build", "dist"}
BROAD = {"Exception", "BaseException"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Limit(NamedTuple):
    """What a figure may be at most today, and what it is to be in the end (None: it is only not to grow)."""

    ceiling: float
    goal: float | None


LIMITS = {
    "lines of a file": Limit(600, 600),
    "lines of a function": Limit(60, 60),
    "median lines of a function": Limit(7, 7),
    "95 % of functions have at most lines": Limit(25, 25),
    "decision-bearing files that a large put enters": Limit(18, 10),
    "files that a large put enters": Limit(59, None),
    "class names that stand for several classes": Limit(0, 0),
    "broad excepts that keep an error": Limit(10, 10),
    "groups of modules that import each other": Limit(0, 0),
}

# Names that more than one class may have, each with the reason: one base name per protocol, and nothing else.
SHARED_NAMES = {
    "TransferQueueController": "public: what programs start an actor with stands before the class of the actor itself",
}


class Source(NamedTuple):
    """A file, read once."""

    path: Path
    text: str
    tree: ast.Module

    def at(self, node: Any, what: str = "") -> str:
        return f"{shown(self.path)}:{node.lineno} {what}".rstrip()


class Figure(NamedTuple):
    """A number that `LIMITS` bounds, and what it is made of, a line each."""

    name: str
    value: float
    places: Sequence[str] = ()

    def line(self) -> str:
        goal = LIMITS[self.name].goal
        aim = "" if goal is None or self.value <= goal else f", goal {goal:g}"
        return f"{self.name}: {self.value:g} (at most {LIMITS[self.name].ceiling:g}{aim})"

    def is_worse(self) -> bool:
        return self.value > LIMITS[self.name].ceiling


def main(arguments: Sequence[str]) -> int:
    run = entered.Run()  # in processes of its own, while the files are read
    package = sources(PACKAGE)
    everything = package + [source for folder in other_folders() for source in sources(folder)]
    figures = [
        *sizes(everything, package),
        shared_class_names(package),
        kept_errors(package),
        cycles(PACKAGE),
    ]
    try:
        figures += way_of_a_put(run.result())
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"house: the way of a put could not be measured: {error}")
        return 1
    for figure in figures:
        print(f"{'WORSE: ' if figure.is_worse() else ''}{figure.line()}")
        if figure.is_worse() or "--places" in arguments or figure.name.startswith("decision"):
            print("".join(f"  {place}\n" for place in figure.places), end="")
    return any(figure.is_worse() for figure in figures)


def sources(folder: Path) -> list[Source]:
    texts = [(path, path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]
    return [Source(path, text, ast.parse(text)) for path, text in texts]


def other_folders() -> list[Path]:
    """Every folder of the repository with code of ours that is no part of the package."""
    found = [folder for folder in sorted(ROOT.iterdir()) if folder.is_dir() and not folder.name.startswith(".")]
    return [folder for folder in found if folder not in (PACKAGE, *PACKAGE.parents) and folder.name not in OUTPUTS]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def sizes(everything: Iterable[Source], package: Iterable[Source]) -> list[Figure]:
    """The caps hold for all code, the median and the 95th percentile are the package's."""
    files = sorted(((source.text.count("\n"), shown(source.path)) for source in everything), reverse=True)
    longest = sorted((size for source in everything for size in lengths(source)), reverse=True)
    ours = sorted(number for source in package for number, _ in lengths(source))
    cap, function_cap = LIMITS["lines of a file"].goal, LIMITS["lines of a function"].goal
    return [
        Figure("lines of a file", files[0][0], [f"{path}: {n}" for n, path in files if n > cap]),
        Figure("lines of a function", longest[0][0], [f"{place}: {n}" for n, place in longest if n > function_cap]),
        Figure("median lines of a function", statistics.median(ours)),
        Figure("95 % of functions have at most lines", ours[int(0.95 * len(ours))]),
    ]


def lengths(source: Source) -> Iterator[tuple[int, str]]:
    """The lines of each function, from its `def` to its last, with the place."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, source.at(node, node.name)


def shared_class_names(package: Iterable[Source], exceptions: Mapping[str, str] = SHARED_NAMES) -> Figure:
    """Names of more than one class of the package, private ones and those within functions included."""
    places = defaultdict(list)
    for source in package:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(source.at(node))
    shared = {name: where for name, where in places.items() if len(where) > 1}
    lines = [f"{name}: {', '.join(where)}" for name, where in sorted(shared.items()) if name not in exceptions]
    lines += [f"{name}: an exception that nothing needs any more" for name in sorted(exceptions.keys() - shared.keys())]
    return Figure("class names that stand for several classes", len(lines), lines)


def kept_errors(package: Iterable[Source]) -> Figure:
    """Places that catch whatever is raised, and on some way through do not raise again.

    Raising is `raise` in the handler itself, or throwing the error into a generator, where it is raised. An error that
    is logged, returned or stored for another thread is kept. `contextlib.suppress` counts as a handler that passes.
    """
    places = [
        source.at(node)
        for source in package
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.ExceptHandler) and is_broad(node.type) and not raises(node.body, node.name))
        or (isinstance(node, ast.Call) and called(node) == "suppress" and any(map(is_broad, node.args)))
    ]
    return Figure("broad excepts that keep an error", len(places), places)


def is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(map(is_broad, caught.elts))
    return caught is None or (isinstance(caught, ast.Name) and caught.id in BROAD)


def raises(body: Sequence[ast.stmt], name: str | None) -> bool:
    """Whether every way through these statements raises, the error `name` or another."""
    return any(always_raises(statement, name) for statement in body)


def always_raises(statement: ast.stmt, name: str | None) -> bool:
    if isinstance(statement, ast.Raise) or throws(statement, name):
        return True
    if isinstance(statement, ast.If):
        return raises(statement.body, name) and raises(statement.orelse, name)
    if isinstance(statement, ast.With | ast.AsyncWith):
        return raises(statement.body, name)
    if isinstance(statement, ast.Try):
        return raises(statement.finalbody, name) or (
            (raises(statement.body, name) or raises(statement.orelse, name))
            and all(raises(handler.body, name) for handler in statement.handlers)
        )
    return False


def throws(statement: ast.stmt, name: str | None) -> bool:
    """Whether it is `generator.throw(name)`, its result assigned or not."""
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.Call) or called(value) != "throw":
        return False
    return any(isinstance(argument, ast.Name) and argument.id == name for argument in value.args)


def called(call: ast.Call) -> str:
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def cycles(package: Path) -> Figure:
    """Groups of modules each of which imports all others, over others: imports for types and in functions included."""
    sys.path.insert(0, str(package.parent))
    try:
        graph = grimp.build_graph(package.name, cache_dir=None)
        at_run_time = grimp.build_graph(package.name, cache_dir=None, exclude_type_checking_imports=True)
    finally:
        sys.path.remove(str(package.parent))
    groups = together({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    places = []
    for group in groups:
        places.append(" <-> ".join(group))
        for importer in group:
            for imported in sorted(graph.find_modules_directly_imported_by(importer).intersection(group)):
                kind = "" if at_run_time.direct_import_exists(importer=importer, imported=imported) else " (for types)"
                places.append(f"  {importer} imports {imported}{kind}")
    return Figure("groups of modules that import each other", len(groups), places)


def together(imports: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other over imports, sorted."""
    reached = {module: reachable(module, imports) for module in imports}
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in imports
        if module in reached[module]
    }
    return sorted(list(group) for group in groups if len(group) > 1)


def reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    """What `start` imports, and what that imports, and so on; `start` itself only where it is in a cycle."""
    found: set[str] = set()
    left = [start]
    while left:
        new = imports[left.pop()] - found
        found |= new
        left += new
    return found


def way_of_a_put(files: Sequence[entered.Entered]) -> list[Figure]:
    deciding = entered.decision_bearing(files)
    return [
        Figure(
            "decision-bearing files that a large put enters",
            len(deciding),
            [f"{one.file}: {one.branches} branches" for one in deciding],
        ),
        Figure("files that a large put enters", len(files), [one.file for one in files]),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
