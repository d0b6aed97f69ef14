"""`tq doctor`: whether this installation and an engine work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transfer_queue.cli.serving import merged


def doctor(
    backend: Annotated[
        str | None, typer.Option(help="Also whether this storage engine works here; start it on every host of a job.")
    ] = None,
    conf: Annotated[Path | None, typer.Option("--config", help="YAML with its settings, as for `tq serve`.")] = None,
    timeout_s: Annotated[float, typer.Option(help="How long each call of the engine may take.")] = 30.0,
) -> None:
    """Whether another distribution lies over this one.

    Says by which command that is mended.
    """
    from transfer_queue_doctor import report

    code = report()
    if backend is not None and not code:
        from transfer_queue import config as settings
        from transfer_queue.storage.engines.probe import probe
        from transfer_queue.storage.transports.probe import probe as probe_transport

        full = merged(conf)
        full.backend.storage_backend = backend
        told = settings.transport(full)
        lines = (
            probe_transport(told["name"], told["settings"], timeout_s)
            if told
            else probe(backend, settings.engine_settings(full, backend), timeout_s)
        )
        for line in lines:
            print(f"{backend}: {line}", flush=True)
    raise typer.Exit(code)
