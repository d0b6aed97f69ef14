"""Everything in a service as files, and back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from transfer_queue.cli.attaching import Address, AsJson, answer, session
from transfer_queue.cli.progress import bar
from transfer_queue.cli.tables import print_json, size
from transfer_queue.errors import InvalidInput

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help=__doc__)


@app.command()
def save(
    directory: Annotated[
        str, typer.Argument(help="Of this machine, or a URL of fsspec's; a checkpoint that is there is replaced.")
    ],
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Write all partitions, as of one instant, to a directory.

    Others go on working meanwhile.
    """
    from transfer_queue import checkpoint
    from transfer_queue.client.operations.overview import overview

    with session(address) as found:
        server = answer(found, overview(found, 0)).server
        expected = server["arena_nbytes_used"] + server["spill_nbytes_used"]
        draft = None if "://" in directory else Path(f"{directory.rstrip('/')}.tmp")
        with bar("saving", draft, expected if draft else 0):
            checkpoint.save(found, directory)
    _tell(directory, server["rows"], as_json)


@app.command()
def load(
    directory: Annotated[str, typer.Argument(help="What `tq checkpoint save` or `save_checkpoint` wrote.")],
    replace: Annotated[bool, typer.Option(help="Also where the service has rows, which are lost.")] = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Replace everything in a service by a checkpoint.

    One atomic step, after every byte of the checkpoint was verified.
    """
    from transfer_queue import checkpoint
    from transfer_queue.client.operations.overview import overview

    with session(address) as found:
        rows = answer(found, overview(found, 0)).server["rows"]
        if rows and not replace:
            raise InvalidInput(f"the service has {rows:,} rows, which would be lost: --replace if they may be")
        with bar("loading"):
            checkpoint.load(found, directory)
        rows = answer(found, overview(found, 0)).server["rows"]
    _tell(directory, rows, as_json)


def _tell(directory: str, rows: int, as_json: bool) -> None:
    from transfer_queue.checkpoint import nbytes_of

    nbytes = nbytes_of(directory)
    if as_json:
        print_json({"directory": directory, "rows": rows, "nbytes": nbytes})
    else:
        print(f"{directory}: {rows:,} rows, {size(nbytes)}", file=sys.stdout)
