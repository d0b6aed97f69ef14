"""`tq page`: a page in a browser that shows a running service."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from transfer_queue.cli.attaching import Address, AsJson, attached
from transfer_queue.cli.tables import print_json

LOOPBACK = "127.0.0.1"


def page(
    address: Address = None,
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes any free one.")] = 0,
    host: Annotated[str, typer.Option(help="Where to listen; not on loopback, it needs a token.")] = LOOPBACK,
    token_file: Annotated[
        Path | None, typer.Option(help="File with a token that every visitor of the page needs.")
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in your browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a running service in a browser, until Ctrl-C.

    Prints where. Needs the extra `http`.
    """
    from transfer_queue.page import beside
    from transfer_queue.wire.token import token_from_file

    beside.check_installed()
    for variable in beside.RECORDING:
        os.environ.pop(variable, None)
    token = "" if token_file is None else token_from_file(str(token_file), "--token-file")
    attached(address).close()  # raises at once where there is none
    with beside.listen(host, port, token) as listener:
        url = beside.url_of(listener)
        if as_json:
            print_json({"url": url})
        else:
            print(url)
        sys.stdout.flush()
        from transfer_queue.page.serving import serve

        if open_browser:
            import webbrowser

            webbrowser.open(url)
        serve(lambda: attached(address), listener, token)
