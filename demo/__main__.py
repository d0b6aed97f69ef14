"""Command line of the demo. Everything heavy is imported after Ctrl-C is taken care of."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from demo.fleet import import_ahead
from demo.interrupts import Interrupts


def main(
    backend: Annotated[str, typer.Option(help="Where rows live; only `local` so far.")] = "local",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.", show_default="800")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Rollout processes.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights, the prompts and the samples.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for the picture and the workers' output.")] = Path("demo-out"),
    short: Annotated[bool, typer.Option("--smoke", help="A few steps in a few seconds; learns nothing.")] = False,
    kill: Annotated[bool, typer.Option("--chaos", help="Kill -9 one worker of each kind on the way.")] = False,
    kill_service: Annotated[
        float | None, typer.Option(min=0.1, help="Kill -9 the service every so many seconds.", show_default="never")
    ] = None,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="End with the same weights in every run, whoever is killed; slower.")
    ] = False,
    page: Annotated[bool, typer.Option("--page", help="Show the queue in a browser; the run prints where.")] = False,
    page_port: Annotated[int, typer.Option(help="Of the page; 0 takes any free one.")] = 0,
) -> None:
    """GRPO on one machine, in processes that share nothing but a transfer_queue."""
    if backend != "local":
        raise typer.BadParameter(f"{backend!r} is not available; this release has 'local'", param_hint="--backend")
    os.environ["OMP_NUM_THREADS"] = "1"  # for the children: one core each
    with Interrupts() as interrupts:
        import_ahead([f"demo.{kind}" for kind in ("trainer", "rollout", "reward", "reference")])
        from demo.command import run
        from demo.settings import choose

        settings = choose(
            short=short,
            steps=steps,
            workers=workers,
            seed=seed,
            out=out,
            kill=kill,
            kill_service_s=kill_service,
            page_port=page_port if page else None,
            reproducible=reproducible,
        )
        sys.exit(run(settings, interrupts))


if __name__ == "__main__":
    typer.run(main)
