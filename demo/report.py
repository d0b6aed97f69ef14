"""What is left of a run: a summary in words and one picture of its curves and its timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from demo.board import Board, Floats, Shares
from demo.port import Doing
from demo.tables import DONE
from demo.view import NOTHING, number

_INK, _GREY, _FAINT = "#22262b", "#8a9099", "#e9ebee"
_GREEN, _AMBER, _VIOLET, _BLUE, _RED = "#1a8f5a", "#d9962b", "#7a5bb5", "#2f7fc1", "#c0392b"
_LOOK = {  # in the order of Shares
    Doing.WORK: ("computing", _GREEN),
    Doing.SAMPLES: ("moving samples", _BLUE),
    Doing.WEIGHTS: ("moving weights", _AMBER),
    Doing.WAIT: ("waiting", _FAINT),
}
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}
_STEPS_SHOWN = 8


def summary(board: Board) -> str:
    """A few lines for the terminal."""
    nbytes = sum(state.nbytes for state in board.workers.values())
    lines = ["", *_learned(board)] if board.metrics else ["", f"no version of the weights: it was {board.phase}"]
    lines += [f"{nbytes / 1e6:,.0f} MB in and out of the queue", "", *_incidents(board)]
    lines.append(f"{'process':<12}{'computing':>12}{'samples':>10}{'weights':>10}{'waiting':>10}")
    for state in board.workers.values():
        work, samples, weights, wait = state.shares()
        lines.append(f"{state.name:<12}{work:>12.0%}{samples:>10.0%}{weights:>10.0%}{wait:>10.0%}")
    return "\n".join([*lines, ""])


def _learned(board: Board) -> list[str]:
    times = board.column("at") - board.started_s
    kl = board.column("kl")
    lines = [
        f"held-out accuracy {_percent(board.start_accuracy())} -> {_percent(board.latest('accuracy'))}",
        f"{times[-1]:.0f} s in all: {times[0]:.0f} s to start up and warm up, {times[-1] - times[0]:.0f} s for "
        f"{board.step} steps on {board.trained_rows:,} samples",
        f"no sample was more than {board.column('lag').max():.0f} versions behind (limit {board.settings.max_lag})",
    ]
    if board.step:
        lines.append(
            f"KL to the reference {number(board.latest('kl', 20), '.2f')} nat per token at the end, "
            f"{number(np.nanmax(kl), '.2f')} at most"
        )
    if board.phase == DONE:
        lines += [
            f"{board.midway} of {board.step} versions reached the rollout workers between two tokens; "
            f"{board.column('mixed').sum():,.0f} samples were made by several versions",
            f"generation was frozen for {board.paused_s / len(times) * 1e3:.1f} ms each time, "
            f"{board.longest_pause_s * 1e3:.1f} ms at most",
            f"weights {board.weights} at the end"
            + (f", as in every such run with seed {board.settings.seed}" if board.settings.reproducible else ""),
        ]
    return lines


def _percent(value: float) -> str:
    """With a decimal; a dash for NaN."""
    return number(value, ".1%")


def _incidents(board: Board) -> list[str]:
    """A table of who was killed; nothing when nobody was."""
    if not board.incidents:
        return []
    lines = [f"{'ended':<12}{'by':>10}{'after':>10}{'at step':>10}{'back in':>10}{'rows on lease':>24}"]
    for one in board.incidents:
        after, back = f"{one.noticed_s - board.started_s:.1f} s", NOTHING
        if one.worked_s is not None:
            back = f"{one.worked_s - one.noticed_s:.1f} s"
        lines.append(f"{one.name:<12}{one.reason:>10}{after:>10}{one.step:>10}{back:>10}{one.rows:>24}")
    return [*lines, ""]


def draw(board: Board, path: Path) -> Path:
    """Write the picture as PNG and return its path. Reads the spans from the queue, so the service must still run.

    Of a run that was interrupted it shows what there is.
    """
    spans = board.read_spans()
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(12.5, 7.6), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.1, wspace=0.03, hspace=0.06)
        if board.step:
            upper, lower = figure.subfigures(2, 1, height_ratios=(1.15, 1.0))
            learning, divergence, flight = upper.subplots(1, 3, width_ratios=(1.7, 1.0, 1.0))
            _draw_learning(learning, board)
            _draw_divergence(divergence, board)
            _draw_flight(flight, board)
            _draw_timeline(lower, board, spans)
        else:
            figure.text(0.5, 0.5, f"interrupted before the first step: {board.phase}", ha="center", color=_GREY)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, facecolor="white")
        plt.close(figure)
    return path


def _draw_learning(axes: Axes, board: Board) -> None:
    times = board.column("at") - board.started_s
    accuracy, reward = board.column("accuracy"), board.column("reward")
    measured = ~np.isnan(accuracy)
    axes.axvspan(0, times[0], color=_FAINT, lw=0)
    axes.text(
        times[0] / 2, 0.98, "start-up and warm start", rotation=90, ha="center", va="top", color=_GREY, fontsize=8
    )
    axes.plot(times, reward, color=_AMBER, lw=0.6, alpha=0.35)
    axes.plot(times, _smooth(reward), color=_AMBER, lw=1.6)
    axes.plot(times[measured], accuracy[measured], color=_GREEN, lw=2.2, marker="o", ms=3)
    axes.set(title="Learning", xlabel="seconds", ylim=(0, 1.03), xlim=(0, times[-1] * 1.02))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(axis="y", color=_FAINT)
    axes.set_axisbelow(True)
    known = accuracy[measured]
    axes.annotate(f"{known[0]:.0%}", (times[measured][0], known[0]), (-6, 0), **_beside("right", _GREEN))
    axes.annotate(f"{known[-1]:.0%}", (times[measured][-1], known[-1]), (0, 6), **_beside("center", _GREEN))
    handles: list[Any] = [
        Patch(color=_GREEN, label="accuracy on held-out problems, greedy"),
        Patch(color=_AMBER, label="reward"),
    ]
    if board.incidents:
        handles.append(plt.Line2D([], [], color=_RED, lw=1, label="a worker was killed"))
    for one in board.incidents:
        at = one.noticed_s - board.started_s
        axes.axvline(at, color=_RED, lw=1)
        axes.text(at, 1.035, one.name, color=_RED, fontsize=7, ha="center", va="bottom")
    axes.legend(handles=handles, loc="lower right", frameon=False, fontsize=8, handlelength=1, handleheight=0.8)


def _draw_divergence(axes: Axes, board: Board) -> None:
    steps, kl = board.column("step")[1:], board.column("kl")[1:]
    axes.plot(steps, kl, color=_VIOLET, lw=0.6, alpha=0.35)
    axes.plot(steps, _smooth(kl), color=_VIOLET, lw=1.6)
    axes.set(title="KL to the reference, nat per token", xlabel="optimiser step")
    axes.set_ylim(bottom=0)  # the top is where the largest value is
    axes.grid(axis="y", color=_FAINT)
    axes.set_axisbelow(True)


def _draw_flight(axes: Axes, board: Board) -> None:
    """Samples that exist: added by rollout workers, cleared by the trainer after the step that they were for."""
    times, rows = (np.array(column, dtype=np.float64) for column in zip(*board.flight, strict=True))
    times -= board.started_s
    limit = board.settings.max_lag * board.settings.rows_per_step
    axes.fill_between(times, rows, step="post", color=_BLUE, alpha=0.3, lw=0)
    axes.plot(times, _smooth(rows, len(rows) // 20), color=_BLUE, lw=1.6)
    axes.axhline(limit, color=_GREY, lw=1, ls=(0, (4, 3)))
    axes.text(times[-1], limit * 1.015, f"limit {limit:,}", ha="right", va="bottom", color=_GREY, fontsize=8)
    axes.set(title="Samples in flight", xlabel="seconds", ylim=(0, limit * 1.15))


def _draw_timeline(figure: Any, board: Board, spans: dict[str, Floats]) -> None:
    """A few steps in the middle of the run, one lane per process, and beside it what the whole run adds up to."""
    lanes, totals = figure.subplots(1, 2, width_ratios=(4.2, 1.0), sharey=True)
    at = board.column("at")
    first = max(0, len(at) // 2 - _STEPS_SHOWN // 2)
    last = min(len(at) - 1, first + _STEPS_SHOWN)
    begin, end = at[first], at[last]
    order = ["trainer", "reference", "reward", *reversed(board.settings.rollout_names)]
    for lane, name in enumerate(order):
        lanes.barh(lane, end - begin, height=0.72, color="#f6f7f8", lw=0)
        for doing, (_, colour) in _LOOK.items():  # freezes lie upon the computing that they held up
            mine = spans.get(name, np.empty((0, 4)))
            mine = mine[mine[:, 2] == doing]
            seen = mine[(mine[:, 1] > begin) & (mine[:, 0] < end)]
            bars = np.column_stack([seen[:, 0] - begin, seen[:, 1] - seen[:, 0]])
            lanes.broken_barh(bars, (lane - 0.36, 0.72), color=colour, lw=0)
        if name in board.workers:
            _draw_total(totals, lane, board.workers[name].shares())
    for version in range(first, last + 1):
        lanes.axvline(at[version] - begin, color=_INK, lw=0.6, ls=(0, (2, 2)))
        lanes.text(at[version] - begin, len(order) - 0.45, f"v{version}", ha="center", va="bottom", fontsize=8)
    lanes.set(xlabel="seconds", xlim=(0, end - begin), ylim=(-0.5, len(order) - 0.45))
    lanes.set_title("Who did what around the middle of the run", pad=16)
    lanes.set_yticks(range(len(order)), order)
    totals.set_title("Whole run", pad=16)
    totals.set(xlim=(0, 1), xticks=())
    totals.spines["bottom"].set_visible(False)
    for axes in (lanes, totals):
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    handles = [Patch(facecolor=colour, edgecolor="#c9ced4", lw=0.5, label=label) for label, colour in _LOOK.values()]
    handles.append(plt.Line2D([], [], color=_INK, lw=0.6, ls=(0, (2, 2)), label="new version of the weights"))
    figure.legend(handles=handles, loc="outside lower left", ncols=5, frameon=False, fontsize=8, handlelength=1.4)


def _draw_total(axes: Axes, lane: int, shares: Shares) -> None:
    left = 0.0
    for doing, share in zip(_LOOK, shares, strict=True):
        axes.barh(lane, share, left=left, height=0.72, color=_LOOK[doing][1], lw=0)
        if share >= 0.12:
            ink = _INK if doing is Doing.WAIT else "white"
            axes.text(left + share / 2, lane, f"{share:.0%}", ha="center", va="center", color=ink, fontsize=8)
        left += share


def _smooth(values: Floats, width: int = 15) -> Floats:
    """Mean of up to `width` values around each, NaN left out."""
    half = max(1, width // 2)
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return np.array([np.nanmean(window) if not np.isnan(window).all() else np.nan for window in windows])


def _beside(side: str, colour: str) -> dict[str, Any]:
    return {
        "textcoords": "offset points",
        "ha": side,
        "va": "center" if side == "right" else "bottom",
        "color": colour,
        "fontweight": "bold",
    }
