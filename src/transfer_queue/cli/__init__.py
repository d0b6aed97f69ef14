"""The command `tq`: a service that outlives its starter, and a look into a running one.

attaching     which service is meant, and a session or client of it
tables        what is printed: tables, texts that are anybody's, JSON
progress      bars on long work, where a person sits before a terminal
serving       `serve`
looking       `status`, `tasks`, `leases`, `groups`, `waits`, `replicas`
listing       `ls`: partitions, keys and tags, as they are
tailing       `tail`: keys and tags as they change, and what happens to rows
inspecting    `inspect`: what is known of one row
previews      values, shortened to a line
top           `top`: what happens now, once a second
observing     what `top` sees of a service that may stop, end and come back
frames        what `top` shows
steps         `dead-letters`, `replay`
sql           `sql`
export        `export`
trace         `trace`
page          `page`
checkpoints   `checkpoint save`, `checkpoint load`
doctor        `doctor`
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from transfer_queue import __version__
from transfer_queue.errors import TransferQueueError

# Where each command is: a function, or an app with commands of its own, in a module of this package. The module is
# imported when its command is run, and all are for `tq --help`: they import what takes time in their functions.
COMMANDS = {
    "serve": "serving.serve",
    "status": "looking.status",
    "top": "top.top",
    "ls": "listing.ls",
    "tail": "tailing.tail",
    "inspect": "inspecting.inspect",
    "tasks": "looking.tasks",
    "leases": "looking.leases",
    "groups": "looking.groups",
    "waits": "looking.waits",
    "replicas": "looking.replicas",
    "dead-letters": "steps.dead_letters",
    "dead": "steps.dead_letters",
    "replay": "steps.replay",
    "page": "page.page",
    "sql": "sql.sql",
    "export": "export.export",
    "trace": "trace.trace",
    "checkpoint": "checkpoints.app",
    "doctor": "doctor.doctor",
}


class LazyCommands(TyperGroup):
    """The commands of `COMMANDS`, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(".")
        found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        if not isinstance(found, typer.Typer):
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command(cmd_name)(found)
            found = single
        return typer.main.get_command(found)


# Without rich's help: that alone takes as long as all else that `tq --help` does.
app = typer.Typer(
    cls=LazyCommands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"transfer_queue {__version__}")
        raise typer.Exit


@app.callback(help=(__doc__ or "").partition("\n")[0])
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command of `sys.argv`. Errors are a line on stderr and exit with 1, bad usage exits with 2."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this: `tq ls >&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  as long as this process
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a stream of somebody's own
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal may not have the sign
    try:
        try:
            app(prog_name="tq")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has enough: `tq ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (TransferQueueError, OSError) as error:
        from transfer_queue.cli.tables import harmless

        print("\n".join(map(harmless, f"tq: {error}".splitlines())), file=sys.stderr)
        raise SystemExit(1) from None
