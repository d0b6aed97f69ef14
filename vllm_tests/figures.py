"""Figures that tests measure by the way, printed at the end of a run."""

from __future__ import annotations

import statistics
from typing import Any

FIGURES: dict[str, list[float]] = {}


def note(what: str, figure: float) -> None:
    """`what` names the figure; seconds, unless it says something else."""
    FIGURES.setdefault(what, []).append(figure)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for what, figures in FIGURES.items():
        middle, most = statistics.median(figures), max(figures)
        terminalreporter.write_line(f"{what}: median {middle:.3f}, max {most:.3f} of {len(figures)}")
