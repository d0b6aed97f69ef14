"""The command `tq`: a service that outlives its starter, and a look into a running one.

export    `tq export`: a partition as Parquet
sql       `tq sql`: a query over partitions
trace     `tq trace`: one timeline of what the processes of a job recorded
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfer_queue import config as settings
from transfer_queue.cli import export, sql
from transfer_queue.cli.trace import trace
from transfer_queue.errors import InvalidInput, NotInitialized, TransferQueueError
from transfer_queue.launch import local
from transfer_queue.server import host_registry

if TYPE_CHECKING:
    from transfer_queue.bundles.bundle import SavedRow
    from transfer_queue.client.client import TransferQueueClient

COMMAND_WIDTH = 80
app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=(__doc__ or "").partition("\n")[0]
)
app.command()(trace)

RunDir = Annotated[str | None, typer.Option(help="Directory of the sockets (mode 0700); others attach by naming it.")]
Address = Annotated[
    str | None,
    typer.Option(help="unix:PATH, tcp:HOST:PORT or a run directory; default TQ_ADDRESS, else your only service here."),
]


@app.command()
def serve(
    run_dir: RunDir = None,
    conf: Annotated[Path | None, typer.Option("--config", help="YAML over the defaults of config.yaml.")] = None,
    host: Annotated[str | None, typer.Option(help="Serve TCP on this address too; needs a token.")] = None,
    port: Annotated[int, typer.Option(help="TCP port; 0 takes any free one.")] = 0,
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
) -> None:
    """Run a service in the foreground until SIGTERM or Ctrl-C. Prints its addresses as one line of JSON."""
    full = _merged(conf)
    if host is not None or join is not None:
        full.server.host, full.server.port, full.server.join = host, port, join
        full.server.token_file = None if token_file is None else str(token_file)
    if journal is not None:
        full.server.journal_dir = journal
    if unit_token_file is not None:
        full.server.unit_token_file = str(unit_token_file)
    config = settings.server_config(full, run_dir or full.run_dir or local.new_run_dir(), owner_pid=0)
    from transfer_queue.server.process import serve as serve_here

    serve_here(config, announce=1)


@app.command()
def status(address: Address = None, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Counts and sizes of a running service, and its partitions."""
    with _attached(address) as client:
        values = client.stats()
        partitions = {name: client.get_partition(name) for name in client.get_partition_list()}
    if as_json:
        print(json.dumps({**values, "partition": partitions}))
    else:
        _print(values, partitions)


def _attached(address: str | None) -> TransferQueueClient:
    """A client of the service that was chosen. Raises as `_chosen`."""
    from transfer_queue.client.client import TransferQueueClient
    from transfer_queue.client.session import Session
    from transfer_queue.wire.address import parse_address

    return TransferQueueClient.of(Session(parse_address(_chosen(address))))


def _chosen(address: str | None) -> str:
    """The address that was given, or TQ_ADDRESS, or that of the only service of this user on this host.

    Raises `NotInitialized` where there is none, `InvalidInput` where there are several, with a list of them.
    """
    known = address or settings.from_env().address
    if known:
        return known
    running = host_registry.running()
    services = [entry for entry in running if not entry.join] or running  # a unit is a part of one
    if not services:
        raise NotInitialized("no service of this user runs on this host; name one with --address")
    if len(services) > 1:
        raise InvalidInput(
            f"{len(services)} services of this user run here, name one with --address:\n{_list(services)}"
        )
    return services[0].address


def _list(services: Sequence[host_registry.ServerEntry]) -> str:
    lines = [("address", "pid", "age", "for", "command")]
    for entry in services:
        lines.append(
            (entry.address, str(entry.server.pid), _age(entry.age_s), entry.job or "-", entry.command[:COMMAND_WIDTH])
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _age(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def _print(values: dict[str, Any], partitions: dict[str, dict[str, Any] | None]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    pools, series = values.pop("groups", {}), values.pop("series", {})
    table = Table("what", "value")
    for name, value in values.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    console.print(table)
    table = Table("partition", "rows", "declared", "metadata")
    for name, info in partitions.items():
        if info is not None:
            table.add_row(name, str(info["rows"]), str(info["size"] or ""), str(info["metadata"] or ""))
    console.print(table)
    for title, counted in (("groups of", pools), ("series", series)):
        if counted:
            table = Table(title, *next(iter(counted.values())))
            for name, counts in counted.items():
                table.add_row(name, *map(str, counts.values()))
            console.print(table)


@app.command("dead-letters")
def dead_letters(
    partition: str,
    task: str,
    requeue: Annotated[bool, typer.Option(help="Offer them to the task again, as if it had never had them.")] = False,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """The rows that a task tried as often as it may, with how often and why it gave them up."""
    with _attached(address) as client:
        found = client.list_dead_letters(partition, task)
        if requeue:
            client.requeue_dead_letters(partition, task, found)
    rows = [
        {"row": row, "attempts": one.attempts, "reason": one.reason, "tags": tag}
        for (row, one), tag in zip(found.redelivered.items(), found.custom_meta, strict=True)
    ]
    if as_json:
        print(json.dumps(rows))
    else:
        _print_rows(rows, ("row", "attempts", "reason", "tags"))
        if requeue:
            print(f"{len(rows)} queued again")


@app.command()
def replay(
    step: int,
    task: str = typer.Option(help="Whose step."),
    source: Annotated[
        Path | None, typer.Option("--from", help="A directory that --save wrote; no service then.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the step to this new directory.")] = None,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """What a task took in a step of its loop: batches, rows in order, keys, versions of the weights."""
    found = _taken(step, task, save, address) if source is None else _saved(source, step, task)
    rows = [
        {"batch": row.batch, "partition": row.partition, "row": row.global_index, "key": row.key, "tags": row.tags}
        for row in found
    ]
    if as_json:
        print(json.dumps(rows))
    else:
        _print_rows(rows, ("batch", "partition", "row", "key", "tags"))


def _saved(source: Path, step: int, task: str) -> list[SavedRow]:
    """The rows of a bundle, all of which is verified. Raises `InvalidInput` for that of another step."""
    from transfer_queue.bundles import Bundle

    bundle = Bundle(source)
    if (bundle.step, bundle.task) != (step, task):
        raise InvalidInput(f"{source} has step {bundle.step} of task {bundle.task!r}")
    for number in range(len(bundle)):
        bundle.verify(number)
        print(f"batch {number}: xxh3-128 {bundle.digest(number)}, verified", file=sys.stderr)
    return bundle.rows


def _taken(step: int, task: str, save: Path | None, address: str | None) -> list[SavedRow]:
    """The rows of a running service that were not cleared; saved where they are to be."""
    from transfer_queue import bundles

    with _attached(address) as client:
        rows = bundles.rows_taken(client.session, step, task)
        if save is not None:
            written = bundles.save(client.session, save, step, task)
            text = f"{written['batches']} batches, {written['rows']} rows, {written['bytes']:,} bytes"
            print(f"{save}: {text}", file=sys.stderr)
    return rows


def _printable(text: str) -> Any:
    """`text`, which may be anybody's, without what a terminal would act on."""
    from rich.text import Text

    return Text("".join(one if one.isprintable() else repr(one)[1:-1] for one in text))


def _print_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*(_printable(str(row[name])) for name in columns))
    Console().print(table)


@app.command()
def doctor(
    backend: Annotated[
        str | None, typer.Option(help="Also whether this storage engine works here; start it on every host of a job.")
    ] = None,
    conf: Annotated[Path | None, typer.Option("--config", help="YAML with its settings, as for `tq serve`.")] = None,
    timeout_s: Annotated[float, typer.Option(help="How long each call of the engine may take.")] = 30.0,
) -> None:
    """Whether another distribution lies over this one, and the command that mends it."""
    from transfer_queue_doctor import report

    code = report()
    if backend is not None and not code:
        from transfer_queue.storage.engines.probe import probe
        from transfer_queue.storage.transports.probe import probe as probe_transport

        full = _merged(conf)
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


def _merged(conf: Path | None) -> Any:
    given: dict[str, Any] = {}
    if conf is not None:
        from omegaconf import OmegaConf

        given = OmegaConf.to_container(OmegaConf.load(conf))
    return settings.merged(given)


sql.register(app, _attached, _printable)
export.register(app, _attached)


def main() -> None:
    try:
        app()
    except TransferQueueError as error:
        print(f"tq: {error}", file=sys.stderr)
        raise SystemExit(1) from None
