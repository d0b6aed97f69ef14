"""`tq doctor`: whether this installation works, a backend on this host or between hosts, and a service that runs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transfer_queue.cli.attaching import AsJson, remedied
from transfer_queue.errors import ConfigError, TransferQueueError

if TYPE_CHECKING:
    from transfer_queue.doctor.report import HostReport, TrialReport
    from transfer_queue.wire.address import Address

SIMPLE = "SimpleStorage"


def doctor(
    backend: Annotated[str | None, typer.Option(help="Also whether this backend works, by what --config says.")] = None,
    conf: Annotated[Path | None, typer.Option("--config", help="YAML with its settings, as for `tq serve`.")] = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, max=600, help="How long each call of the backend may take.")
    ] = 30.0,
    others: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="HOST:PORT", help="Between this host and that one; once for each other host."),
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Listen there for a doctor who runs --with elsewhere.")
    ] = None,
    wait_s: Annotated[
        float,
        typer.Option(
            help="With --with: wait so long for the others to listen. With --serve: for one doctor, then end."
        ),
    ] = 0.0,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Of a service that runs: whether this host reaches each of its servers, and its rows.",
        ),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token; or TQ_TOKEN, TQ_TOKEN_FILE.")] = None,
    as_json: AsJson = False,
) -> None:
    """Whether this installation works, and a backend.

    Between hosts: --serve on all but one, then --with on that one. Of a service that runs: --address.
    """
    if address is not None and (others or serve is not None):
        raise typer.BadParameter(
            "of a service that runs; --with and --serve try one of their own", param_hint="--address"
        )
    if (others or serve is not None) and backend is None:
        raise typer.BadParameter("name it: --serve and --with try a backend", param_hint="--backend")
    if others and serve is not None:
        raise typer.BadParameter("one host leads by --with, the others --serve", param_hint="--serve")
    _look_at_installation(as_json, is_all=backend is None and address is None)
    if address is not None:
        _try_service(backend, address, _known_token(token_file), timeout_s, as_json)
        return
    if backend is None:
        return
    token = _token(token_file) if others or serve is not None else ""
    full = _settings(backend, conf)
    if serve is not None:
        _serve(_place(serve, token, "--serve"), backend, full, wait_s, as_json)
    elif others or backend == SIMPLE:
        _lead(backend, full, [_place(one, token, "--with") for one in others or ()], token, timeout_s, wait_s, as_json)
    else:
        _try_here(backend, full, timeout_s, as_json)


def _look_at_installation(as_json: bool, is_all: bool) -> None:
    """Ends the command where something is wrong with it."""
    import transfer_queue_doctor

    if not as_json:
        code = transfer_queue_doctor.report()
        if code:
            raise typer.Exit(code)
        return
    from transfer_queue.cli.tables import print_json

    trouble = transfer_queue_doctor.explanation()
    if is_all or trouble is not None:
        installed = [str(one) for one in transfer_queue_doctor.installed()]
        print_json({"works": trouble is None, "installed": installed, "trouble": trouble or ""})
    if trouble is not None:
        raise typer.Exit(1)


def _known_token(path: Path | None) -> str:
    from transfer_queue.wire.token import token_from_environment, token_from_file

    return token_from_environment() if path is None else token_from_file(str(path), "--token-file")


def _token(path: Path | None) -> str:
    token = _known_token(path)
    if not token:
        raise ConfigError("between hosts a token is needed: name --token-file, or set TQ_TOKEN or TQ_TOKEN_FILE")
    return token


def _place(text: str, token: str, option: str) -> Address:
    from transfer_queue.wire.address import parse_address

    try:
        place = parse_address(f"tcp:{text.removeprefix('tcp:')}", token)
    except ConfigError:
        place = None
    if place is None or not place.host or place.port > 65535:
        raise typer.BadParameter(f"{text!r}: expected HOST:PORT", param_hint=option)
    return place


def _settings(backend: str, conf: Path | None) -> Any:
    from transfer_queue.cli.serving import merged

    full = merged(conf)
    full.backend.storage_backend = backend
    return full


def _serve(place: Address, backend: str, full: Any, wait_s: float, as_json: bool) -> None:
    from transfer_queue.cli.tables import print_json
    from transfer_queue.doctor.agent import DoctorAgent
    from transfer_queue.doctor.trial import settings_of

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    agent = DoctorAgent(place, backend, settings_of(full))
    try:
        if as_json:
            print_json({"backend": backend, "address": str(agent.address)})
        else:
            host = str(agent.address).removeprefix("tcp:")
            print(f"{backend}: on another host, `tq doctor --backend {backend} --with {host}`")
        sys.stdout.flush()
        agent.wait(wait_s)
    finally:
        agent.close()


def _lead(
    backend: str, full: Any, others: Sequence[Address], token: str, timeout_s: float, wait_s: float, as_json: bool
) -> None:
    from transfer_queue.doctor.trial import settings_of, try_hosts

    _show(try_hosts(backend, settings_of(full), others, token, timeout_s, wait_s), as_json)


def _try_service(backend: str | None, address: str, token: str, timeout_s: float, as_json: bool) -> None:
    from transfer_queue.doctor.running import try_service
    from transfer_queue.wire.address import parse_address

    place = parse_address(address, token)
    with remedied():
        report = try_service(backend, place, timeout_s)
    _show(report, as_json)


def _show(report: TrialReport, as_json: bool) -> None:
    """Ends the command where it does not work."""
    from transfer_queue.cli.tables import print_json

    if as_json:
        print_json(report)
    else:
        _print_report(report)
    if not report.works:
        raise typer.Exit(1) if as_json else report.error()


def _print_report(report: TrialReport) -> None:
    from transfer_queue.cli.tables import harmless, print_table, size

    print_table(
        ("host", "name", "server at", "transport at", "free memory", "RDMA devices", "libraries", "opened", "written"),
        map(_host_row, report.hosts),
    )
    if report.reads:
        print_table(
            ("written by", "read by", "size", "time", "each second"),
            [
                (
                    one.writer, one.reader, size(one.nbytes) if one.nbytes else None,
                    _duration(one.seconds) or "not read",
                    None if one.seconds is None else size(one.nbytes / max(one.seconds, 1e-6)),
                )
                for one in report.reads
            ],
        )  # fmt: skip
    for remark in report.remarks:
        print(harmless(remark))
    if report.works:
        pairs = len(report.reads)
        print(f"{report.backend} works: {pairs} {'read' if pairs == 1 else 'reads'}, every byte compared")
    sys.stdout.flush()


def _host_row(one: HostReport) -> tuple[str | None, ...]:
    """Empty cells where a host was not reached, or did not come so far, or is a server that says nothing of it."""
    from transfer_queue.cli.tables import size

    facts: tuple[str | None, ...] = (None, None, None)
    if one.free_nbytes is not None:
        libraries = [("Python", one.python), *one.libraries.items()]
        facts = (
            size(one.free_nbytes), ", ".join(one.rdma_devices) or "none",
            ", ".join(f"{name} {version}" for name, version in libraries),
        )  # fmt: skip
    return (
        one.host, one.name or None, one.address or None, one.endpoint or None, *facts, _duration(one.opened_s),
        _duration(one.written_s),
    )  # fmt: skip


def _duration(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.2f} s"


def _try_here(backend: str, full: Any, timeout_s: float, as_json: bool) -> None:
    """A storage engine or a transport, on this host alone."""
    from transfer_queue import config as settings
    from transfer_queue.cli.tables import print_json
    from transfer_queue.storage.engines.probe import probe
    from transfer_queue.storage.transports.probe import probe as probe_transport

    told = settings.transport(full)
    lines = (
        probe_transport(told["name"], told["settings"], timeout_s)
        if told
        else probe(backend, settings.engine_settings(full, backend), timeout_s)
    )
    seen: list[str] = []
    try:
        for line in lines:
            seen.append(line)
            if not as_json:
                print(f"{backend}: {line}", flush=True)
    except TransferQueueError as error:
        if not as_json:
            raise
        print_json({"backend": backend, "works": False, "seen": seen, "code": error.code, "text": str(error)})
        raise typer.Exit(1) from None
    if as_json:
        print_json({"backend": backend, "works": True, "seen": seen})
