"""`tq serve`, a service in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from transfer_queue.errors import ConfigError

RunDir = Annotated[str | None, typer.Option(help="Directory of the sockets (mode 0700); others attach by naming it.")]


def serve(
    run_dir: RunDir = None,
    conf: Annotated[Path | None, typer.Option("--config", help="YAML over the defaults of config.yaml.")] = None,
    host: Annotated[str | None, typer.Option(help="Serve TCP on this address too; needs a token.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port at --host; 0, the default, takes any free one.")] = None,
    journal: Annotated[
        str | None,
        typer.Option(help="Directory of a journal: the rows outlive the machine, and those that are in it come back."),
    ] = None,
    join: Annotated[
        str | None, typer.Option(help="Be a storage unit of the service at tcp:HOST:PORT; needs both tokens.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token; or TQ_TOKEN, TQ_TOKEN_FILE.")] = None,
    unit_token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token of units, for those that join; or TQ_UNIT_TOKEN, TQ_UNIT_TOKEN_FILE."),
    ] = None,
    page_port: Annotated[
        int | None, typer.Option("--page", help="Show it in a browser at this port of this host; 0 takes any free one.")
    ] = None,
) -> None:
    """Run a service in the foreground until SIGTERM or Ctrl-C.

    Prints its addresses as one line of JSON.
    """
    from transfer_queue import config as settings
    from transfer_queue.launch import local

    settings.warn_of_slips()
    full = merged(conf)
    options = {
        "host": host, "port": port, "join": join, "journal_dir": journal,
        "token_file": token_file and str(token_file), "unit_token_file": unit_token_file and str(unit_token_file),
    }  # fmt: skip
    for name, given in options.items():
        if given is not None:  # the file's settings stay where there is no option
            full.server[name] = given
    if port is not None and not (full.server.host or full.server.join):
        raise typer.BadParameter("nothing listens to the network without --host", param_hint="--port")
    named = settings.run_dir(run_dir or full.run_dir)
    config = settings.server_config(full, named or local.new_run_dir(), owner_pid=0)
    from transfer_queue.server.process import serve as serve_here

    if page_port is None:
        serve_here(config, announce=1)
        return
    import msgspec

    from transfer_queue.page.beside import beside
    from transfer_queue.server.settings import SOCKET_NAME

    with beside(f"unix:{config.run_dir}/{SOCKET_NAME}", page_port) as life:
        serve_here(msgspec.structs.replace(config, life=life), announce=1)


def merged(conf: Path | None) -> Any:
    """The settings of a file over the defaults."""
    from transfer_queue import config as settings

    return settings.merged({} if conf is None else _read(conf))


def _read(conf: Path) -> Any:
    """What a file of settings holds. Raises `ConfigError` where that is no YAML, with the line."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        return OmegaConf.to_container(OmegaConf.load(conf))
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"--config: {conf} is no YAML of settings: {' '.join(str(error).split())}") from error
