"""A wall clock that jumps ends no lease and no deadline."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

SOURCES = ROOT / "src" / "transfer_queue"
SERVES = ("controller", "groups", "memory", "sampler", "server", "wire", "client", "dataloader")
FILES = ("wait_queue.py", "claims.py", "locks.py", "storage/blocks.py", "storage/in_time.py", "storage/pins.py")


def wall_clocks(path: Path) -> Iterator[str]:
    """Where a file asks for the time of day, of files as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and (
            ast.unparse(node) in ("time.time", "time.time_ns", "time.CLOCK_REALTIME")
            or node.attr in ("st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns")
        ):
            yield ast.unparse(node)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "datetime" in ast.unparse(node):
            yield ast.unparse(node)


def test_whoever_serves_or_is_served_goes_by_the_monotonic_clock() -> None:
    paths = [path for name in SERVES for path in (SOURCES / name).rglob("*.py")]
    paths += [SOURCES / name for name in FILES]
    found = {(str(path.relative_to(SOURCES)), clock) for path in paths for clock in wall_clocks(path)}
    assert len(paths) > 100
    assert found == {
        ("server/journal/files.py", "time.time_ns"),  # in each frame, for people; nothing goes by it
        ("server/journal/history.py", "time.time"),  # when something happened, for people
        ("server/process.py", "time.time_ns"),  # where the numbers of a life's locks begin
    }
