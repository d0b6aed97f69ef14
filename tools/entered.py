"""The files of the package that a put of a large field enters, in the client's process and in the server's.

A file is *entered* when one of its functions is called between the put's call and its return. It is
*decision-bearing* when the functions that are entered have at least `MIN_BRANCHES` branches in their source (`if`,
`elif`, `while`, `case`, `except`, a conditional expression), counted whether or not this put takes them: who follows
the put has to read all of them. Fewer is a check or two, or constant work on the way past: an accessor, a definition
of data, "is anything due?" asked of something empty. Both numbers are printed, as branches spread thinly over more
files would lower the second alone.

The put is an everyday one: of a field that is known, by a client that has put before; only what each of several such
puts enters counts, so that the service's other work, which runs at times of its own, does not. Run as a program, it
prints how the entered files rank.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "transfer_queue"
PROFILED = Path(__file__).resolve().parent / "profiled"
MIN_BRANCHES = 4
NUM_ROWS, ROW_NBYTES, NUM_PUTS = 64, 1 << 20, 4
TIMEOUT_S = 60.0
BRANCHES = (ast.If, ast.While, ast.match_case, ast.ExceptHandler, ast.IfExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# What the measured client runs; it knows the public interface alone. It prints when each put began and ended.
CLIENT = f"""
import json, time
import torch
from tensordict import TensorDict
import transfer_queue as tq

tq.init()
client, spans = tq.get_client(), []
for _ in range({NUM_PUTS}):
    data = TensorDict({{"x": torch.zeros({NUM_ROWS}, {ROW_NBYTES}, dtype=torch.uint8)}}, batch_size={NUM_ROWS})
    start = time.monotonic()
    client.put(data, partition_id="p")
    spans.append((start, time.monotonic()))
tq.close()
print(json.dumps(spans))
"""


class Entered(NamedTuple):
    """A file, and how many branches its entered functions have."""

    file: str
    branches: int
    functions: tuple[str, ...]


class Run:
    """A put that is being measured in processes of its own, while its starter does something else."""

    def __init__(self, package: Path = PACKAGE, client: str = CLIENT) -> None:
        self._package = package
        self._folder = tempfile.TemporaryDirectory()
        self._notes = Path(self._folder.name) / "notes"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
        environment |= {"TQ_HOUSE_PACKAGE": str(package), "TQ_HOUSE_NOTES": str(self._notes)}
        environment["PYTHONPATH"] = os.pathsep.join([str(PROFILED), str(package.parent)])
        self._process = subprocess.Popen([sys.executable, "-c", client], env=environment, stdout=subprocess.PIPE)

    def result(self) -> list[Entered]:
        """The entered files, those with the most branches first; blocks until the puts are done.

        Raises `RuntimeError` where the client failed, and `subprocess.TimeoutExpired`.
        """
        with self._folder:
            try:
                out, _ = self._process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
                raise
            if self._process.returncode:
                raise RuntimeError(f"the client whose put is measured ended with status {self._process.returncode}")
            notes = self._notes.read_text(encoding="utf-8").splitlines()
        return ranked(common(notes, json.loads(out)[1:]), self._package)


def common(notes: Iterable[str], spans: Iterable[tuple[float, float]]) -> Mapping[Path, set[int]]:
    """The first lines of the functions that were called within each of the spans, by file."""
    calls = [(float(time), (Path(file), int(line))) for time, line, file in (note.split("\t") for note in notes)]
    called = [{place for time, place in calls if start <= time <= end} for start, end in spans]
    found: dict[Path, set[int]] = {}
    for file, line in set.intersection(*called):
        found.setdefault(file, set()).add(line)
    return found


def ranked(places: Mapping[Path, set[int]], package: Path) -> list[Entered]:
    """What is entered, by the number of branches. Module bodies do not count: an import is no step of a put."""
    entered = []
    for file, lines in places.items():
        named = {first_line(node): node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if is_function(node)}
        functions = [named[line] for line in sorted(lines) if line in named]
        if functions:
            branches, names = sum(map(own_branches, functions)), tuple(function.name for function in functions)
            entered.append(Entered(file.relative_to(package).as_posix(), branches, names))
    return sorted(entered, key=lambda one: (-one.branches, one.file))


def is_function(node: ast.AST) -> bool:
    return isinstance(node, FUNCTIONS)


def first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The line that its code object names: that of the first decorator, where there is one."""
    return min(node.lineno for node in (function, *function.decorator_list))


def own_branches(function: ast.AST) -> int:
    """The branches in the source of a function, without those of functions defined in it."""
    return sum(
        isinstance(child, BRANCHES) + own_branches(child)
        for child in ast.iter_child_nodes(function)
        if not is_function(child)
    )


def decision_bearing(entered: Iterable[Entered]) -> list[Entered]:
    return [one for one in entered if one.branches >= MIN_BRANCHES]


def main() -> None:
    for file, branches, functions in Run().result():
        print(f"{branches:3}  {file}  ({', '.join(functions)})")


if __name__ == "__main__":
    main()
