"""The live view of a run, and its plain form for output that is not a terminal."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from types import TracebackType

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from demo.board import Board, Floats, WorkerState

_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 32
_PLAIN_EVERY_S = 5.0
NOTHING = "–"
_COLOURS = {"work": "green", "samples": "cyan", "weights": "magenta", "wait": "bright_black"}


class View:
    """A context. `show` draws the board: in place on a terminal, else a line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next_line_s = 0.0
        self._last_phase = ""
        self._told: dict[str, int] = {}

    def __enter__(self) -> View:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, board: Board) -> None:
        """Draw what the board holds now."""
        if self._live:
            self._live.update(dashboard(board), refresh=True)
            return
        for name, pid in board.pids.items():
            if self._told.get(name) != pid:
                self._console.print(f"{name} is process {pid}", highlight=False, soft_wrap=True)
        self._told = dict(board.pids)
        now = time.monotonic()
        if now >= self._next_line_s or board.phase != self._last_phase:
            self._console.print(plain_line(board), highlight=False, soft_wrap=True)
            self._next_line_s = now + _PLAIN_EVERY_S
            self._last_phase = board.phase


def plain_line(board: Board) -> str:
    """The board in one line."""
    elapsed = f"{time.monotonic() - board.started_s:6.1f} s"
    if not board.metrics:
        return f"{elapsed}  {board.phase}: {board.updates} updates, {board.solved:.0%} solved"
    nbytes_per_s, rows_per_s = board.rates
    waits = " ".join(f"{state.name.replace(' ', '')}={state.wait_s:.1f}s" for state in board.workers.values())
    return (
        f"{elapsed}  {board.phase}: step {board.step}/{board.settings.steps}  reward {percent(_reward(board))}"
        f"  held-out {percent(board.latest('accuracy'))}  in flight {board.rows_in_flight}"
        f"  {rows_per_s:.0f} rows/s  {nbytes_per_s / 1e6:.1f} MB/s  waited {waits}"
    )


def dashboard(board: Board) -> RenderableType:
    """The board as a block of about twenty lines."""
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=3)
    grid.add_column(ratio=2)
    grid.add_row(_learning(board), _queue(board))
    return Group(_header(board), grid, _workers(board), _incidents(board))


def _header(board: Board) -> RenderableType:
    line = Table.grid(expand=True, padding=(0, 2))
    line.add_column()
    line.add_column(ratio=1)
    line.add_column(justify="right")
    elapsed = f"{time.monotonic() - board.started_s:.0f} s"
    if board.metrics:
        bar = ProgressBar(total=board.settings.steps, completed=board.step, complete_style="green")
        line.add_row(Text("GRPO", style="bold"), bar, f"step {board.step}/{board.settings.steps}   {elapsed}")
    else:
        bar = ProgressBar(total=board.settings.warm_until, completed=board.solved, complete_style="yellow")
        line.add_row(Text(board.phase, style="bold"), bar, f"{board.updates} updates   {elapsed}")
    return line


def _learning(board: Board) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("held-out accuracy", percent(board.latest("accuracy")), _spark(board.column("accuracy"), "green"))
    table.add_row("reward", percent(_reward(board)), _spark(board.column("reward"), "yellow"))
    table.add_row(
        "KL to reference", number(board.latest("kl", 10), ".3f"), _spark(board.column("kl"), "magenta", top=None)
    )
    table.add_row("clipped tokens", percent(board.latest("clipped", 10)), "")
    table.add_row("start", percent(board.start_accuracy()), "after the supervised warm start")
    table.add_row("now", "", _judged(board.examples))
    return Panel(table, title="learning", title_align="left", box=box.ROUNDED, border_style="bright_black")


def _queue(board: Board) -> Panel:
    nbytes_per_s, rows_per_s = board.rates
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("rows in flight", f"{board.rows_in_flight:,}")
    table.add_row("rows trained", f"{board.trained_rows:,}")
    table.add_row("rows/s", f"{rows_per_s:,.0f}")
    table.add_row("MB/s in and out", f"{nbytes_per_s / 1e6:.1f}")
    table.add_row("weights version", str(board.step))
    table.add_row("versions behind", f"{number(board.latest('lag'), '.0f')} (limit {board.settings.max_lag})")
    return Panel(table, title="transfer_queue", title_align="left", box=box.ROUNDED, border_style="bright_black")


def _workers(board: Board) -> Panel:
    table = Table(box=None, expand=True, header_style="bright_black")
    table.add_column("process", style="bold")
    table.add_column("pid", justify="right")
    table.add_column("rows", justify="right")
    table.add_column(_legend(), width=_BAR_WIDTH)
    for name in ("computing", "samples", "weights", "waiting", "waited"):
        table.add_column(name, justify="right")
    for state in board.workers.values():
        shares = [percent(share) for share in state.shares()]
        pid = str(board.pids.get(state.name, NOTHING))
        table.add_row(state.name, pid, f"{state.rows:,}", _bar(state), *shares, f"{state.wait_s:.1f} s")
    return Panel(table, title="processes", title_align="left", box=box.ROUNDED, border_style="bright_black")


def _incidents(board: Board) -> Text:
    return Text("\n").join(
        Text(f"{one.name} was ended by {one.reason} at step {one.step}", style="red").append(
            "" if one.worked_s is None else f", at work again after {one.worked_s - one.noticed_s:.1f} s",
            style="green",
        )
        for one in board.incidents
    )


def _legend() -> Text:
    return Text.assemble(*((f"■ {name} ", colour) for name, colour in _COLOURS.items()))


def _bar(state: WorkerState) -> Text:
    shares = state.shares()
    widths = [round(share * _BAR_WIDTH) for share in shares[:-1]]
    widths.append(max(0, _BAR_WIDTH - sum(widths)))
    return Text.assemble(*(("█" * width, colour) for width, colour in zip(widths, _COLOURS.values(), strict=True)))


def _spark(values: Floats, colour: str, width: int = 36, top: float | None = 1.0) -> Text:
    """`values` without NaN as `width` blocks of their means; full height is `top`, or the largest."""
    known = [value for value in values.tolist() if not math.isnan(value)]
    if not known:
        return Text("")
    bounds = [len(known) * i // min(width, len(known)) for i in range(min(width, len(known)) + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(bounds)]
    full = top or max(max(means), 1e-9)
    return Text("".join(_BLOCKS[min(7, max(0, int(mean / full * 8)))] for mean in means), style=colour)


def _judged(examples: str) -> Text:
    """`12+34=46  ...` with the right ones green and the wrong ones red."""
    text = Text()
    for example in examples.split():
        problem, _, answer = example.partition("=")
        right = answer == str(sum(int(number) for number in problem.split("+")))
        text.append(example, style="green" if right else "red").append("  ")
    return text


def _reward(board: Board) -> float:
    return board.latest("reward", 10)


def percent(value: float) -> str:
    """Nothing is known yet of NaN."""
    return number(value, ".0%")


def number(value: float | None, form: str) -> str:
    """`value` in this form; a dash where there is none, or NaN."""
    return NOTHING if value is None or math.isnan(value) else format(value, form)
