"""`tq trace`: what the processes of a job recorded, as one timeline."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from transfer_queue.cli.attaching import AsJson
from transfer_queue.cli.tables import harmless, print_json
from transfer_queue.errors import InvalidInput


def trace(
    recorded: Annotated[str, typer.Argument(help="What TQ_TRACE named.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("timeline.json"),
    since: Annotated[float | None, typer.Option(help="Only the last so many seconds.")] = None,
    max_flows: Annotated[int, typer.Option(help="How many rows have arrows from their put to their ack.")] = 200,
    as_json: AsJson = False,
) -> None:
    """Make one timeline of a recorded job.

    What its processes recorded (TQ_TRACE) is joined, for ui.perfetto.dev or chrome://tracing.
    """
    from transfer_queue.trace.recordings import read_folder
    from transfer_queue.trace.timeline import write_timeline

    if max_flows < 0 or (since is not None and not since >= 0):
        raise InvalidInput("--since and --max-flows are numbers from 0")
    if not output.name:
        raise InvalidInput(f"{output} is no file")
    processes, remarks = read_folder(recorded)
    for remark in remarks:
        print(harmless(remark), file=sys.stderr)
    part = output.with_name(f"{output.name}.part")
    try:
        with part.open("wb") as into:
            counts = write_timeline(processes, into, since, max_flows)
        os.replace(part, output)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise InvalidInput(f"{output} cannot be written: {error}") from None
    if as_json:
        print_json({"file": str(output), **counts._asdict()})
        return
    lost = f", {counts.lost} lost" if counts.lost else ""
    print(f"{output}: {counts.processes} processes, {counts.spans} spans{lost}, {counts.flows} flows")
