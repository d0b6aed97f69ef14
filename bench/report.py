"""The table, printed and as Markdown, and the same with every sample as JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.result import Row, Target, ratio

HEADER = (
    "case",
    "what",
    "ours",
    "tq 0.1.11",
    "ray",
    "memcpy M",
    "x M",
    "x tq",
    "x ray",
    "samples",
    "target",
    "verdict",
)


def duration(seconds: float) -> str:
    """Three significant digits with the unit that fits."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "s":
        return duration(value)
    if unit == "B/s":
        return f"{value / 1e9:.3g} GB/s"
    if unit == "count":
        return f"{value:,.0f}"
    return f"{value:,.0f} /s" if unit == "ops/s" else f"{value:.3g} x"


def quotient(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def target_text(target: Target) -> str:
    mark = {True: "ok", False: "NO", None: "?"}[target.met]
    return f"{target.text} [{mark}]"


def sampled(row: Row) -> str:
    """How many numbers each figure is the median of; once where they are as many for all."""
    counts = [(system, len(row.samples[system])) for system in ("ours", "tq", "ray") if row.samples.get(system)]
    if len({count for _, count in counts}) <= 1:
        return str(counts[0][1]) if counts else ""
    return ", ".join(f"{system} {count}" for system, count in counts)


def cells(row: Row) -> tuple[str, ...]:
    """One row as text."""
    shown = {
        system: row.words.get(system)
        or number(row.values.get(system), row.unit)
        or ("failed" if system in row.failures else "-")
        for system in ("ours", "tq", "ray")
    }
    timed = row.unit == "s" and row.memcpy is not None
    return (
        str(row.case),
        row.what,
        shown["ours"],
        shown["tq"],
        shown["ray"],
        number(row.memcpy, "s"),
        quotient(ratio(row.memcpy, row.values.get("ours"))) if timed else "",
        quotient(row.versus("tq")) if row.unit not in ("x", "count") else "",
        quotient(row.versus("ray")) if row.unit not in ("x", "count") else "",
        sampled(row),
        "; ".join(target_text(target) for target in row.targets),
        row.verdict,
    )


def ordered(rows: Sequence[Row]) -> list[Row]:
    """By case number, whatever order they ran in."""
    return sorted(rows, key=lambda row: row.case)


def table(rows: Sequence[Row]) -> str:
    """Aligned columns for a terminal."""
    lines = [HEADER, *(cells(row) for row in ordered(rows))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def remarks(rows: Sequence[Row]) -> list[str]:
    """Notes and failures, each with its case; a remark that several rows share is said once."""
    found: dict[str, None] = {}
    for row in ordered(rows):
        for note in row.notes:
            found[f"{row.case}: {row.what}: {note}"] = None
        if row.skipped:
            found[f"{row.case}: {row.what}: skipped: {row.skipped}"] = None
        for system, reason in row.failures.items():
            found[f"{row.case}: {system} failed: {reason}"] = None
    return list(found)


def markdown(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """The table for docs/benchmarks.md, with the machine it was measured on."""
    lines = [
        f"Measured {machine['date']} on {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, load "
        f"{machine['load']} at the start; medians of so many `samples`, in {machine['repeat']} interleaved rounds "
        "or as many as a case has; `M` is a warm "
        "single-thread memcpy of the same bytes in the same rounds. "
        + "; ".join(f"{system}: {versions}" for system, versions in machine["versions"].items()),
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + "---|" * len(HEADER),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in ordered(rows)),
        "",
        *(f"- {remark}" for remark in remarks(rows)),
    ]
    return "\n".join(lines) + "\n"


def machine_facts() -> dict[str, Any]:
    """What a reader needs to compare numbers: processor, cores, memory, load, kernel, date."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = models[0].partition(":")[2].strip() if models else platform.machine()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load": f"{os.getloadavg()[0]:.2f}",
        "kernel": platform.release(),
    }


def record(row: Row) -> dict[str, Any]:
    """One row for JSON, outcomes included."""
    targets = [asdict(target) | {"met": target.met} for target in row.targets]
    return asdict(row) | {"targets": targets, "verdict": row.verdict}


def write(rows: Sequence[Row], machine: dict[str, Any], directory: Path) -> None:
    """Write results.json and results.md."""
    rows = ordered(rows)
    directory.mkdir(parents=True, exist_ok=True)
    records = [record(row) for row in rows]
    (directory / "results.json").write_text(json.dumps({"machine": machine, "rows": records}, indent=1))
    (directory / "results.md").write_text(markdown(rows, machine))
