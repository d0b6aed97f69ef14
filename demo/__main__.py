"""Command line of the demo: starts the service and the workers, watches, and tells how it went."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

import transfer_queue as tq
from demo import reference, report, reward, rollout, trainer
from demo.board import Board
from demo.fleet import Fleet, WorkerFailed
from demo.settings import Settings, smoke
from demo.view import View
from transfer_queue.errors import ServiceUnavailable

_REFRESH_S = 0.25


def main(
    backend: Annotated[str, typer.Option(help="Where rows live; only `local` so far.")] = "local",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.", show_default="800")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Rollout processes.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights, the prompts and the samples.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for the picture and the workers' output.")] = Path("demo-out"),
    short: Annotated[bool, typer.Option("--smoke", help="A few steps in a few seconds; learns nothing.")] = False,
) -> None:
    """GRPO on one machine, in processes that share nothing but a transfer_queue."""
    if backend != "local":
        raise typer.BadParameter(f"{backend!r} is not available; this release has 'local'", param_hint="--backend")
    settings = smoke(seed, workers) if short else Settings(seed=seed, num_rollout_workers=workers)
    if steps is not None:
        settings = replace(settings, steps=steps)
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the children: one core each
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=settings.samples_per_prompt, group_tag="group_id")
    try:
        tq.init({"controller": {"sampler": sampler}})
        board = _run(settings, out, console)
    except (WorkerFailed, ServiceUnavailable) as failure:
        print(failure, file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("interrupted: every process has been ended", file=sys.stderr)
        raise typer.Exit(130) from None
    else:
        print(report.summary(board))
        print(f"curves and timeline: {report.draw(board, out / 'run.png')}")
    finally:
        tq.close()


def _run(settings: Settings, out: Path, console: Console) -> Board:
    """Start every worker and watch until all are done. Raises `WorkerFailed`; no worker is left in any case."""
    board = Board(settings)
    with Fleet(out / "logs") as fleet, View(console) as view:
        fleet.start("trainer", trainer.run, "trainer", settings)
        for name in settings.rollout_names:
            fleet.start(name, rollout.run, name, settings)
        fleet.start("reward", reward.run, "reward", settings)
        fleet.start("reference", reference.run, "reference", settings)
        done = False
        while not done:
            # Wakes at once when a worker ends; the timeout is how often the picture is drawn anew.
            done = fleet.wait(_REFRESH_S)
            board.refresh()
            view.show(board)
    return board


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    typer.run(main)
