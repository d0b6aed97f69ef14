"""The HTML of the page. Every name and value is escaped by the templates' environment, none is marked as safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from transfer_queue.page.shown import Values

# What changes while somebody looks. HTMX puts each element into the place of the one that has its id.
OF_SERVICE = ("facts", "waits", "leases", "sessions", "replicas", "groups", "series")
OF_PARTITION = ("tiles", "partition", "about", "lanes", "tasks")
FULL = 0.9  # of the memory
WIDTH, HEIGHT, LEAST_LOOKS = 240, 20, 40  # of a curve: its box in the page, and looks that fill it
HTMX = {
    "includeIndicatorCSS": False,  # the policy of the page takes styles of its own files only
    "extensions": "sse",
    "history": "reload",
    "defaultTimeout": 10_000,
    "sse": {"reconnectDelay": 500, "reconnectMaxDelay": 1000, "reconnectJitter": 0.2, "connectTimeout": 4000},
}


def state(kind: str, word: str, text: str = "") -> dict[str, bytes]:
    """Whether the service is there ("live", "bad"), in one word; and what is wrong, in a sentence."""
    return _rendered(["state"], {"kind": kind, "word": word, "text": text})


def of_service(values: Values) -> dict[str, bytes]:
    """What `shown.service` gave, as everybody sees it."""
    return _rendered(OF_SERVICE, {**values, "warnings": _warnings(values)})


def of_partition(
    service: Values, partition: Values | None, lanes: Values, written: Sequence[float], used: Sequence[float]
) -> dict[str, bytes]:
    """What whoever looks at the partition sees (None: there is none). `written` and `used`: rates of the latest looks,
    the last one now."""
    curves = {
        "written": curve(written), "written_per_s": written[-1] if written else 0.0,
        "used": curve(used), "used_per_s": used[-1] if used else 0.0,
    }  # fmt: skip
    return _rendered(OF_PARTITION, {**service, "shown": partition, "lanes": lanes, "curves": curves})


def row(found: Values, partition_id: str) -> bytes:
    """What `journey` gave."""
    title = f"Row #{found['row']}" + ("" if found["key"] is None else f" · {found['key']}")
    return _row(found, "", title, partition_id, found["row"])


def refusal(why: str, partition_id: str, row: int | None) -> bytes:
    """In place of a row."""
    return _row(None, why, "Row" if row is None else f"Row #{row}", partition_id, row)


def index(partition_id: str) -> bytes:
    """The page, which has nothing in it before the first of its events."""
    htmx = msgspec.json.encode(HTMX).decode()
    return _render("index", {"partition_id": partition_id, "htmx": htmx})


def login() -> bytes:
    return _render("login", {})


def curve(rates: Sequence[float]) -> str:
    """The points of a line through all of them, from the left. Of equal ones that follow each other the first and last
    are enough; where all are equal the line goes through, and stays the same while nothing changes."""
    if len(set(rates)) == 1:
        rates = [rates[0]] * (LEAST_LOOKS + 1)
    most, step = max(rates, default=0.0) or 1.0, WIDTH / max(LEAST_LOOKS, len(rates) - 1)
    points = [(at * step, HEIGHT - 2 - (HEIGHT - 4) * rate / most) for at, rate in enumerate(rates)]
    runs = [list(run) for _, run in groupby(points, key=lambda point: round(point[1], 1))]
    ends = [point for run in runs for point in (run[:1] if len(run) == 1 else (run[0], run[-1]))]
    return " ".join(f"{x:.4g},{y:.3g}" for x, y in ends)


def _render(name: str, values: Mapping[str, Any]) -> bytes:
    return ENVIRONMENT.get_template(f"{name}.html").render(values).encode()


def _rendered(names: Sequence[str], values: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: _render(name, values) for name in names}


def _row(found: Values | None, why: str, title: str, partition_id: str, row: int | None) -> bytes:
    beside = {"before": row - 1 if row else None, "after": None if row is None else row + 1}
    queries = {name: "" if at is None else f"partition={partition_id}&row={at}" for name, at in beside.items()}
    return _render("row", {"found": found, "error": why, "title": title, "partition_id": partition_id, **queries})


def _warnings(values: Values) -> list[str]:
    server, told = values["server"], list[str]()
    budget, used = server["arena_nbytes_budget"] or 0, server["arena_nbytes_used"] or 0
    if budget and used > FULL * budget:
        told.append(f"Memory is {100 * used / budget:.0f} % full: puts wait until rows are cleared.")
    rest = (server["waiting_requests"] or 0) - values["num_waits"]
    if rest > 0:
        which = "request waits" if rest == 1 else "requests wait"
        told.append(f"{rest:,} more {which}: for a checkpoint that is loaded.")
    if server["dead_letters"]:
        told.append(f"{server['dead_letters']:,} dead letters: tq dead-letters PARTITION TASK shows them.")
    lost = [one["name"] for one in values["partitions"] if one["lost"]]
    if lost:
        told.append(f"Rows of {', '.join(lost[:3])} lost cells with their host.")
    return told


def _count(value: Any) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, (int, float)) else str(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    minutes = int(value // 60)
    return f"{minutes} min {int(value % 60)} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _nbytes(value: float | None) -> str:
    if value is None:
        return "–"
    unit = 0
    while value >= 1024 and unit < 4:
        value, unit = value / 1024, unit + 1
    return f"{value:.{1 if unit and value < 100 else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.{1 if 0 < value < 10 else 0}f}"


def _happened(event: Values) -> str:
    """An event of a row, after who it was."""
    task, detail = event["task"], event["detail"]
    whose = f"it for {task}" if task else detail
    texts = {
        "written": f"wrote {detail}",
        "finished": f"made it: {detail}",
        "taken": f"took it for {task}",
        "selected": f"took {detail}",
        "withheld": f"took {detail} without it",
        "acknowledged": f"acknowledged {whose}",
        "returned": f"gave back {whose}" + (f": {detail}" if task and detail else ""),
    }
    return texts.get(event["what"], f"{event['what']} {task} {detail}")


ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True, auto_reload=False,
)  # fmt: skip
FILTERS: dict[str, Callable[..., str]] = {
    "count": _count, "seconds": _seconds, "nbytes": _nbytes, "rate": _rate, "happened": _happened,
}  # fmt: skip
ENVIRONMENT.filters |= FILTERS
