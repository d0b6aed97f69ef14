"""What `top` shows of a service, in as many lines as there are: whole lines, the busiest first where not all fit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from transfer_queue.cli.looking import names_of, ready_of
from transfer_queue.cli.observing import Rates, Sight
from transfer_queue.cli.tables import aligned, harmless, seconds, shown, size

if TYPE_CHECKING:
    from rich.text import Text

    from transfer_queue.wire import messages as m

LACK_LINES = 2  # of the words that say what a request lacks
NO_RATES = Rates(0.0, {}, {})
BAR = 20
MAX_UNITS = 4


class FrameSection(NamedTuple):
    """Lines of a table, each of several columns; where a line has one only, it is words under the line before it."""

    columns: Sequence[str]
    lines: list[Sequence[str]]
    more: str  # what those are that do not fit


def frame(sight: Sight, width: int, height: int) -> list[Text]:
    """The lines, at most `height` of at most `width` columns."""
    from rich.text import Text

    lines = _head(sight, width)
    if sight.overview is not None:
        sections = [one for one in _sections(sight, width) if one.lines]
        room = height - len(lines) - 1 - sum(2 for _ in sections)
        for section, share in zip(sections, _shares([len(one.lines) for one in sections], room), strict=True):
            lines += [Text(""), *_table(section, share)]
    lines = lines[: height - 1]
    lines += [Text("")] * (height - 1 - len(lines))
    lines.append(Text("q or Ctrl-C ends", style="dim"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _head(sight: Sight, width: int) -> list[Text]:
    from rich.text import Text

    where = harmless(sight.address) or "no service"
    lines = [Text.assemble(("tq top  ", "bold"), (sight.note, "yellow"))]
    if lines[0].cell_len + 2 + len(where) <= width:
        lines[0].append(f"  {where}" if sight.note else where)
    else:
        lines += map(Text, _wrapped(where, width))
    if sight.trouble:
        text = f"nothing seen for {seconds(sight.silent_s)}, looking again: {harmless(sight.trouble)}"
        lines += [Text(line, style="bold red") for line in _wrapped(text, width)]  # the last ones say what to do
    if sight.overview is not None:
        lines += _counts(sight.overview, sight.rates or NO_RATES)
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    """Addresses are cut where a line ends and nowhere else, so that they can be copied."""
    return textwrap.wrap(text, max(20, width), break_on_hyphens=False)


def _counts(seen: m.ServiceOverview, rates: Rates) -> list[Text]:
    from rich.text import Text

    server, units = seen.server, list(seen.server["units"].items())
    weights = "none yet" if seen.weight_version is None else f"version {seen.weight_version}"
    busy = f"{rates.requests:,.0f} requests/s, {server['clients']} clients, {seen.num_waits} waiting"
    return [
        Text(f"pid {server['pid']}, {server['rows']:,} rows, {busy}, {seen.num_leases} leases"),
        Text(f"memory {_memory(server)}; weights {weights}"),
        *(Text(f"unit {number} {_memory(one)} at {harmless(one['address'])}") for number, one in units[:MAX_UNITS]),
        *([Text(f"and {len(units) - MAX_UNITS} more units")] if len(units) > MAX_UNITS else []),
    ]


def _memory(server: dict[str, Any]) -> str:
    """Of one server; a unit that is away or has only just joined has not told."""
    if "arena_nbytes_used" not in server:
        return "is away" if server["away"] else "has not told"
    used, budget, spilled = server["arena_nbytes_used"], server["arena_nbytes_budget"], server["spill_nbytes_used"]
    full = round(BAR * min(1.0, used / budget)) if budget else 0
    disk = f", {size(spilled)} on disk" if spilled else ""
    return f"[{'#' * full}{'.' * (BAR - full)}] {size(used)} of {size(budget)}{disk}"


def _sections(sight: Sight, width: int) -> list[FrameSection]:
    assert sight.overview is not None
    rates = sight.rates or NO_RATES
    return [
        _waits(sight.overview, width),
        _replicas(sight.overview),
        _tasks(sight.overview, rates),
        _partitions(sight.overview, rates),
    ]


def _partitions(seen: m.ServiceOverview, rates: Rates) -> FrameSection:
    """Each with the fields that are on all rows or on fewer; the rate is that of the field that grew most."""
    found: list[tuple[float, Sequence[str]]] = []
    for part in seen.partitions:
        rate = max((rates.written.get((part.name, field.name), 0.0) for field in part.fields), default=0.0)
        fields = ", ".join(
            field.name if num == part.rows else f"{field.name} {num:,}"
            for field, num in zip(part.fields, part.written, strict=True)
        )
        rows = f"{part.rows:,}" if part.declared is None else f"{part.rows:,}/{part.declared:,}"
        found.append((rate, (_name(part.name), rows, f"{rate:,.1f}", shown(fields))))
    lines = [line for _, line in sorted(found, key=lambda one: -one[0])]
    return FrameSection(("partition", ">rows", ">written/s", "fields"), lines, "partitions")


def _tasks(seen: m.ServiceOverview, rates: Rates) -> FrameSection:
    found = []
    for part in seen.partitions:
        for task in part.tasks:
            rate = rates.consumed.get((part.name, task.name), 0.0)
            ready = ready_of([{"ready": view.ready} for view in task.views])
            numbers = [ready or 0, task.leased + task.kept, task.consumed]
            line = (
                _name(f"{part.name}/{task.name}"), *(f"{one:,}" for one in numbers), f"{rate:,.1f}",
                f"{task.dead:,}" if task.dead else "", f"{task.stale:,}" if task.stale else "",
            )  # fmt: skip
            found.append((rate, line))
    lines: list[Any] = [line for _, line in sorted(found, key=lambda one: -one[0])]
    columns = ("partition/task", ">ready", ">leased", ">consumed", ">used/s", ">dead", ">stale")
    return FrameSection(columns, lines, "tasks")


def _waits(seen: m.ServiceOverview, width: int) -> FrameSection:
    """Those that have waited longest come first. What a request lacks is in the lines under it."""
    import textwrap

    whose = names_of(seen)
    lines: list[Sequence[str]] = []
    for one in sorted(seen.waits, key=lambda one: -(one.waited_s or 0.0)):
        place = "/".join(filter(None, (one.partition, one.task)))
        lines.append((harmless(one.call), _name(place), whose(one.session), seconds(one.waited_s), seconds(one.left_s)))
        words = textwrap.wrap(harmless(one.lacks), max(20, width - 4), max_lines=LACK_LINES, placeholder=" …")
        lines += [(f"    {text}",) for text in words]
    return FrameSection(("waits", "for", "of", ">waited", ">left"), lines, "lines about those who wait")


def _replicas(seen: m.ServiceOverview) -> FrameSection:
    """Those that are not ready come first, each with the reason under it."""
    lines: list[Sequence[str]] = []
    for one in sorted((one for fleet in seen.fleets for one in fleet.replicas), key=lambda one: (one.ready, one.name)):
        version = one.label if one.version is None else f"{one.version}"
        state = "ready" if one.ready else "not ready"
        lines.append((_name(one.name), shown(version or "none", 20), state, seconds(one.since_s)))
        if not one.ready:
            lines.append((f"    {harmless(one.reason)}",))
    return FrameSection(("replica", ">weights", "state", ">since"), lines, "lines about replicas")


def _name(text: str) -> str:
    return shown(text, 40)


def _shares(wanted: Sequence[int], room: int) -> list[int]:
    """How many lines each section gets of so many: all it wants, or an equal part of what others leave."""
    given = [0] * len(wanted)
    left = sorted(range(len(wanted)), key=lambda number: wanted[number])
    for at, number in enumerate(left):
        given[number] = max(0, min(wanted[number], room // (len(left) - at)))
        room -= given[number]
    return given


def _table(section: FrameSection, share: int) -> list[Text]:
    """The head and `share` lines; the last of them says how many more there are."""
    from rich.text import Text

    lines = section.lines
    if share < len(lines):
        shown_lines = lines[: max(0, share - 1)]
        lines = [*shown_lines, (f"    … {len(section.lines) - len(shown_lines):,} more {section.more}",)][:share]
    names = [name.removeprefix(">") for name in section.columns]
    right = [name.startswith(">") for name in section.columns]
    table = iter(aligned([names, *(row for row in lines if len(row) > 1)], right))
    head = Text(next(table), style="bold")
    return [head, *(Text(next(table)) if len(row) > 1 else Text(row[0], style="dim") for row in lines)]
