"""`tq export`: a live partition as Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from transfer_queue.cli.attaching import Address, AsJson, attached
from transfer_queue.cli.progress import counted


def export(
    partition: str,
    target: Annotated[Path, typer.Argument(help="FILE.parquet, or a directory that does not exist yet.")],
    layout: Annotated[
        str,
        typer.Option(
            "--format",
            help="parquet, hf: a directory for `datasets.load_dataset`, or hf-disk: one for `datasets.load_from_disk`.",
        ),
    ] = "parquet",
    column: Annotated[list[str] | None, typer.Option(help="Only this column; may be given several times.")] = None,
    as_bytes: Annotated[
        list[str] | None, typer.Option(help="A field of objects to write as bytes (images, strings, bytes).")
    ] = None,
    preview_chars: Annotated[
        int | None, typer.Option(help="At most so many characters of objects that are no strings; default: all.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the file.")] = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Write a partition as Parquet, or for Hugging Face.

    Whole and on disk, or not at all. Needs the extra `parquet` (docs/tables.md).
    """
    from transfer_queue.errors import InvalidInput, TransferQueueError
    from transfer_queue.tables import extras

    extras.require("parquet", "tq export")
    from transfer_queue.tables.export import ExportForm
    from transfer_queue.tables.export import export as write

    with attached(address) as client, counted("rows") as told:
        wanted = ExportForm(layout, column or None, as_bytes or (), preview_chars, overwrite, told)
        try:
            written = write(client.session, partition, target, wanted)
        except TransferQueueError:
            raise
        except OSError as error:
            raise InvalidInput(str(error)) from None
    if as_json:
        print(json.dumps(written))
    else:
        print(f"{target}: {written['rows']:,} rows, {written['files']} files, {written['bytes']:,} bytes")
