"""The functions of the package: this process's one connection to the service, key-value interface, checkpoints."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import secrets
import select
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from transfer_queue import bundles, checkpoint, dump
from transfer_queue import config as settings
from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.connection import Connection
from transfer_queue.client.drivers import run, run_async, show_as_public
from transfer_queue.client.effects import Operation
from transfer_queue.client.groups import GroupPool, open_pool
from transfer_queue.client.operations import kv, partitions, staleness, update
from transfer_queue.client.recording import OperationNote
from transfer_queue.client.retry import Retry, nobody_listens
from transfer_queue.client.session import Session
from transfer_queue.client.tracing import traced
from transfer_queue.errors import (
    AccessDenied,
    DeadlineExceeded,
    NotInitialized,
    ServiceError,
    ServiceRestarted,
    ServiceUnavailable,
)
from transfer_queue.groups import GroupPolicy
from transfer_queue.launch import choose, controller_actor, left_behind, service_info
from transfer_queue.launch.launcher import Launcher, RunningService
from transfer_queue.tables import extras
from transfer_queue.trace import switch
from transfer_queue.wire.address import Address, parse_address
from transfer_queue.wire.handshake import Life

P = ParamSpec("P")
T = TypeVar("T")
CHECK_S = 1.0
log = logging.getLogger("transfer_queue")

_lock = threading.RLock()
_TQ_CLIENT: TransferQueueClient | None = None  # these two names are TransferQueue's: programs read and replace them
_TQ_CONTROLLER: Any = None  # the handle of the service's actor, where this process found or started it through Ray
_service: RunningService | None = None  # the one this process owns
# What this process wrote into these environment variables, and what stood there before.
_announced: dict[str, tuple[str, str | None]] = {}


def _leave_to_parent() -> None:
    """In a forked child nobody has the lock, whichever thread of the parent had it and is not here."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_leave_to_parent)


def init(conf: Any = None) -> Any:
    """Attach this process to the service, starting one when there is none. Idempotent, also from many processes.

    The service is looked for at `conf.address`, at the environment variable TQ_ADDRESS (which child processes inherit),
    in `conf.run_dir` or TQ_RUN_DIR, in the Ray cluster that this process is connected to, and in its job: torchrun, a
    Slurm step, ranks, a program and the processes it started. `conf` is a DictConfig or mapping merged over
    config.yaml. Returns the merged DictConfig when it started the service, which then ends with this process (that of
    a job: with the job), and `conf` itself when it attached. Tells which on the logger "transfer_queue", at level INFO;
    warns with `ConfigMismatch` where the running service has other settings, and where `conf` names another service
    than the one this process is attached to already. `client.allow_pickle` is about this
    process alone: the service's does not count, and a later call may change it. In a process whose service died it
    attaches to the one that took its place, or starts one. Raises `ConfigError`, `ServiceUnavailable`.
    """
    global _TQ_CLIENT, _TQ_CONTROLLER, _service
    with _lock:
        if _TQ_CLIENT is not None and not _still_attached(_TQ_CLIENT):
            _leave_the_dead()
        if _TQ_CLIENT is None:
            settings.warn_of_slips()
            full = settings.merged(conf)
            pickling = settings.pickling(full)
            _log_as_told()
            launcher = _launcher(full)
            while not _attach(full, launcher):
                _service = launcher.launch(settings.server_config(full, _run_dir(full), os.getpid()))
                if _service is not None:  # otherwise another process was faster
                    atexit.register(close)
                    try:
                        _TQ_CLIENT = _connected(_service.addresses)
                    except BaseException:
                        close()
                        raise
                    _TQ_CONTROLLER = controller_actor()
                    full.address = str(_TQ_CLIENT.session.address)
                    full.controller.zmq_info = service_info(_TQ_CLIENT.session.address, _TQ_CONTROLLER)
                    full.metrics.endpoint = _TQ_CLIENT.session.config["metrics_endpoint"]
                    _choose_pickling(pickling)
                    _say("started", _TQ_CLIENT.session)
                    return full
            _warn_of_unused_run_dir(full, get_client().session)
        else:
            full = None if conf is None else settings.merged(conf)
            pickling = settings.pickling(full) if full is not None else None
            _warn_of_another_service(full, _TQ_CLIENT.session)
        _choose_pickling(pickling)
        settings.warn_of_differences(conf, get_client().session.config)
        return conf


def _still_attached(client: TransferQueueClient) -> bool:
    """Whether the client's service lives, or another has taken its place: on another host than its first one that takes
    another unit here. A frozen server counts as alive. Raises
    `ServiceUnavailable` where one on this host may run that cannot be reached: letting go of it could end it."""
    global _TQ_CLIENT
    is_local = client.address.is_local
    retry = Retry(is_local, time.monotonic() + CHECK_S)
    while True:
        try:
            session = client.session
            if session.closed:  # by its user, which ends no service
                _TQ_CLIENT = _client_of(Session(session.address))
            else:
                session.check(CHECK_S)
        except ServiceRestarted:
            continue  # another life answers: look whether the client can attach to it
        except DeadlineExceeded:
            return True
        except ServiceUnavailable as error:
            pause_s = retry.pause_s(error)
            if pause_s is None:
                if is_local and not nobody_listens(error):
                    raise
                log.warning("%s", error)
                return False
            select.select([], [], [], pause_s)
        else:
            return not left_behind(session.address)


def _warn_of_another_service(full: Any, session: Session) -> None:
    """Warn with `ConfigMismatch` where `full` names a service that is not the one this process is attached to. Where
    nobody answers at a path, it may be that of another host."""
    for name in ("address", "run_dir"):
        wanted = None if full is None else full[name]
        wanted = settings.run_dir(wanted) if name == "run_dir" else wanted
        place = parse_address(str(wanted)) if wanted else None
        if place is not None and not _leads_to(session, place, if_silent=place.is_local):
            text = (
                f"this process stays attached to {session.address} until close(); {name} is another service: {wanted}"
            )
            warnings.warn(text, settings.ConfigMismatch, stacklevel=3)


def _warn_of_unused_run_dir(full: Any, session: Session) -> None:
    """Warn with `ConfigMismatch` where TQ_ADDRESS led to another service than the one of the run directory that `full`
    names."""
    named = "" if full.address or not settings.from_env().address else settings.run_dir(full.run_dir)
    if named and not _leads_to(session, parse_address(named), if_silent=False):
        text = f"TQ_ADDRESS counts before run_dir: attached to {session.address}, not in {named}; unset it to be there"
        warnings.warn(text, settings.ConfigMismatch, stacklevel=3)


def _leads_to(session: Session, address: Address, if_silent: bool) -> bool:
    """Whether the service of `session` is at `address`; `if_silent` where nobody answers there."""
    if address == session.address:
        return True
    try:
        Connection(address, secrets.token_bytes(16), CHECK_S, life=Life(session.service_id)).close()
    except ServiceRestarted:
        return False
    except DeadlineExceeded:  # it may be a frozen one, which says nothing about whose it is
        return True
    except ServiceError:
        return if_silent
    return True


def _leave_the_dead() -> None:
    """Let go of a service that died, so that this process finds or starts another one."""
    address = str(get_client().address)
    close()
    if os.environ.get("TQ_ADDRESS") == address:  # inherited: it leads nowhere any more
        del os.environ["TQ_ADDRESS"]


def _choose_pickling(chosen: bool | None) -> None:
    """Let this process pickle or not, as it was told, and those that it starts from now on."""
    if chosen is None:
        return
    get_client().session.allow_pickle = chosen
    _withdraw("TQ_ALLOW_PICKLE")
    if settings.from_env().allow_pickle != chosen:
        _announce("TQ_ALLOW_PICKLE", "1" if chosen else "0")


def _announce(name: str, value: str) -> None:
    """Put an environment variable, for the processes that this one starts from now on."""
    _withdraw(name)
    if os.environ.get(name) != value:
        _announced[name] = value, os.environ.get(name)
        os.environ[name] = value


def _withdraw(name: str) -> None:
    """What stood there before `_announce`, unless somebody changed it since."""
    value, before = _announced.pop(name, (None, None))
    if value is None or os.environ.get(name) != value:
        return
    del os.environ[name]
    if before is not None:
        os.environ[name] = before


class _Fallback(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 cannot name what it writes to
    """Standard error, as long as the program has not set up logging by itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def _log_as_told() -> None:
    """Give the logger "transfer_queue" the level of TQ_LOGGING_LEVEL, and a handler where it has none."""
    level = settings.from_env().logging_level
    if not level:
        return
    logger = logging.getLogger("transfer_queue")
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = _Fallback()
        handler.setFormatter(logging.Formatter("%(asctime)s - %(levelname)s - %(name)s - %(message)s"))
        logger.addHandler(handler)


def _run_dir(full: Any) -> str:
    return settings.run_dir(full.run_dir or settings.from_env().run_dir)


def _launcher(full: Any) -> Launcher:
    return choose(_run_dir(full), bool(full.server.join), bool(full.server.journal_dir))


def _attach(full: Any, launcher: Launcher) -> bool:
    """Attach to a running service; False when there is none."""
    global _TQ_CLIENT, _TQ_CONTROLLER
    known = str(full.address or "") or settings.from_env().address
    gone: ServiceUnavailable | None = None
    if known and not (launcher.has_hosts and left_behind(parse_address(known))):
        address = parse_address(known)
        try:
            _TQ_CLIENT = _client_of(Session(address))
            if full.address:
                _announce("TQ_ADDRESS", str(address))  # without a token
            _say("attached to", _TQ_CLIENT.session)
            return True
        except ServiceUnavailable as error:
            if not (launcher.has_hosts and address.is_local):
                raise
            gone = error  # a socket of another host or of the past: workers inherit settings from anywhere
    addresses = launcher.find()
    if addresses:
        _TQ_CLIENT = _connected(addresses)
        _say("attached to", _TQ_CLIENT.session)
        _TQ_CONTROLLER = controller_actor()
        return True
    if gone is not None and full.address:
        raise gone
    return False


def _say(what: str, session: Session) -> None:
    where = "" if session.address.is_local else f" on {session.address.host}"
    log.info("%s the service at %s, process %d%s", what, session.address, session.server_pid, where)


def _connected(addresses: Sequence[Address]) -> TransferQueueClient:
    """A client at the first address that answers; processes that this one starts find the service there, too."""
    *nearer, last = addresses
    session = None
    for address in nearer:
        with contextlib.suppress(ServiceUnavailable, AccessDenied):  # its node's server may run as another user
            session = Session(address)
            break
    session = session or Session(last)
    if session.address.is_local:
        _announce("TQ_ADDRESS", str(session.address))
    return _client_of(session)


def _client_of(session: Session) -> TransferQueueClient:
    session.allow_pickle = settings.from_env().allow_pickle
    return TransferQueueClient.of(session)


def close() -> None:
    """Detach this process; the one that started the service also ends it. Without a service nothing happens."""
    global _TQ_CLIENT, _TQ_CONTROLLER, _service
    with _lock:
        client, _TQ_CLIENT = _TQ_CLIENT, None
        _TQ_CONTROLLER = None
        service, _service = _service, None
        if client is not None:
            client.close()
        _withdraw("TQ_ADDRESS")
        _withdraw("TQ_ALLOW_PICKLE")
        if service is not None:
            atexit.unregister(close)
            service.stop()


def get_client() -> TransferQueueClient:
    """The client of this process. Raises `NotInitialized` (an AssertionError) before `init`."""
    if _TQ_CLIENT is None:
        raise NotInitialized("call transfer_queue.init() first")
    return _TQ_CLIENT


def _maybe_create_tq_client(conf: Any = None) -> TransferQueueClient:
    """The client of this process, attached if need be: to the service at `conf.address`, else to the one that is found.

    Under this name other programs call it. Raises `NotInitialized` (an AssertionError), `ServiceUnavailable`.
    """
    if _TQ_CLIENT is None and conf is not None and conf.get("address"):
        init({"address": conf["address"]})
    else:
        _session()
    return get_client()


def address() -> str:
    """Where this process is attached, as `init({"address": ...})` and TQ_ADDRESS take it in others. Raises
    `NotInitialized` where no service was started or found."""
    return str(_session().address)


def get_metrics_endpoint() -> str | None:
    """host:port of the Prometheus metrics; None when they are disabled, and where no service is found."""
    try:
        endpoint: str | None = _session().config.get("metrics_endpoint")
    except NotInitialized:
        return None
    return endpoint


def _session() -> Session:
    """The session of this process, attached on first use when a service runs."""
    if _TQ_CLIENT is None:
        full = settings.merged(None)
        _log_as_told()
        with _lock:
            if _TQ_CLIENT is None and not _attach(full, _launcher(full)):
                raise NotInitialized("TransferQueue is not initialized: call transfer_queue.init(), or set TQ_ADDRESS")
    return get_client().session


def _plain(operation: Callable[Concatenate[Session, P], Operation[T]]) -> Callable[P, T]:
    @functools.wraps(operation)
    def function(*args: P.args, **kwargs: P.kwargs) -> T:
        session = _session()
        note = OperationNote(session, operation.__name__, args, kwargs) if switch.is_on else None
        return run(session, traced(operation(session, *args, **kwargs), operation.__name__), note)

    function.__module__ = __name__  # where pickle finds it
    show_as_public(function, operation)
    return function


def _async(operation: Callable[Concatenate[Session, P], Operation[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    @functools.wraps(operation)
    async def function(*args: P.args, **kwargs: P.kwargs) -> T:
        session = _session()
        note = OperationNote(session, operation.__name__, args, kwargs) if switch.is_on else None
        return await run_async(session, traced(operation(session, *args, **kwargs), operation.__name__), note)

    function.__module__ = __name__
    function.__name__ = function.__qualname__ = f"async_{operation.__name__}"
    show_as_public(function, operation)
    return function


kv_put, async_kv_put = _plain(kv.kv_put), _async(kv.kv_put)
kv_batch_put, async_kv_batch_put = _plain(kv.kv_batch_put), _async(kv.kv_batch_put)
kv_batch_get, async_kv_batch_get = _plain(kv.kv_batch_get), _async(kv.kv_batch_get)
kv_batch_get_by_meta = _plain(kv.kv_batch_get_by_meta)
async_kv_batch_get_by_meta = _async(kv.kv_batch_get_by_meta)
kv_list, async_kv_list = _plain(kv.kv_list), _async(kv.kv_list)
kv_clear, async_kv_clear = _plain(kv.kv_clear), _async(kv.kv_clear)
kv_watch, async_kv_watch = _plain(kv.kv_watch), _async(kv.kv_watch)
kv_update, async_kv_update = _plain(update.kv_update), _async(update.kv_update)
kv_empty, async_kv_empty = _plain(update.kv_empty), _async(update.kv_empty)
set_weight_version, async_set_weight_version = (
    _plain(staleness.set_weight_version),
    _async(staleness.set_weight_version),
)
admit, async_admit = _plain(staleness.admit), _async(staleness.admit)
give_back, async_give_back = _plain(staleness.give_back), _async(staleness.give_back)
open_partition, async_open_partition = _plain(partitions.open_partition), _async(partitions.open_partition)
finish_partition, async_finish_partition = _plain(partitions.finish_partition), _async(partitions.finish_partition)
series_status, async_series_status = _plain(partitions.series_status), _async(partitions.series_status)


def group_pool(partition_id: str, policy: GroupPolicy | None = None, version: int | None = None) -> GroupPool:
    """The groups of siblings of one partition. The first call says by which `policy`, others may leave it out.

    `version` is the trainer's version that the pool begins with (default: the one announced last, else 0). A pool that
    is there stays as it is, until `GroupPool.remove`. Raises `InvalidInput` for another policy than that of a pool in
    use, `NotInitialized`.
    """
    client = get_client()
    if policy is not None:
        run(client.session, open_pool(client.session, partition_id, policy, version))
    return GroupPool(client, partition_id)


def save_checkpoint(
    checkpoint_dir: str | os.PathLike[str], *, include_storage: bool = True, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write all partitions, as of one instant, to a directory of this machine, or below a URL that fsspec opens
    (`s3://bucket/runs/7`). Others go on working meanwhile.

    Replaces an earlier checkpoint there atomically; until then, and when this raises, the earlier one stays. Nothing
    else is replaced, nor what lies beside it: `<dir>.tmp` is written, and refused where that is not a draft.
    `metadata` is kept in metadata.json. Rows are always stored: `include_storage=False` only warns. Blocks until the
    files are on disk, or in the store. Raises `NotInitialized` (a RuntimeError), `UnsupportedValue` (`metadata` is not
    JSON), `InvalidInput` (something else lies there), OSError; for URLs `ConfigError`, and `StoreFull`,
    `ServiceUnavailable` or `DeadlineExceeded` when the store is full, refuses, or does not answer for 120 s.
    """
    checkpoint.save(_session(), checkpoint_dir, include_storage, metadata)


def load_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Replace everything in the service by what `save_checkpoint` wrote, in a directory or below a URL: one atomic
    step, after all of it was verified.

    Needs room for both until then. Raises `NotInitialized` (a RuntimeError), `CheckpointMissing` (a FileNotFoundError),
    `CheckpointCorrupt` and `CheckpointUnsupported` (ValueErrors), `InvalidInput` (the service runs another sampler),
    `StoreFull`, and for URLs what `save_checkpoint` raises; nothing has changed then.
    """
    checkpoint.load(_session(), checkpoint_dir)


def dump_data_by_key(dump_dir: str | os.PathLike[str], keys: Sequence[str], partition_id: str) -> dict[str, int]:
    """Write the rows of `keys`, with all fields and tags, to a new directory of this machine, or below a URL as
    `save_checkpoint` does; nothing in the service changes. Rows are read some at a time: writers of these rows have to
    be paused.

    The directory appears whole, with all files on disk, or not at all. A key that repeats counts once. Returns
    `{"keys", "rows_with_data", "shards", "bytes"}`. Raises `FileExistsError` for a directory that exists,
    `InvalidInput` for a `<dir>.tmp` that is no draft, `UnknownRows` (a RuntimeError) for a key or partition that does
    not exist, `RowCleared` for rows that are cleared meanwhile, `NotInitialized` (a RuntimeError), OSError.
    """
    return dump.dump(_session(), dump_dir, keys, partition_id)


def load_data_by_key(dump_dir: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Put the rows that `dump_data_by_key` wrote back into their partition, by key; returns `{key: tag}`.

    Known keys keep their row, others get new ones, in the order of the dump; other rows, fields and names in tags stay.
    Every byte is verified, and the types of fields compared, before anything changes; then some rows at a time appear
    (where that is not their order, all of them with their tags, and then the fields of some at a time), and a repeated
    call completes one that failed in between. Consumption is not in a dump. Raises `CheckpointMissing` (a
    FileNotFoundError), `CheckpointCorrupt`, `CheckpointUnsupported` and `SchemaConflict` (ValueErrors), `StoreFull`,
    `NotInitialized` (a RuntimeError).
    """
    return dump.load(_session(), dump_dir)


def save_step(directory: str | os.PathLike[str], step: int, task_name: str) -> dict[str, int]:
    """Write what a task used for a step (`TransferQueueClient.checkpoint`) to a new directory, or below a URL as
    `save_checkpoint` does: its batches in order, bit for bit, with keys, tags, settings and digests. `replay` reads it,
    `tq replay` shows it, without a service.
    Tags that changed since are saved as they are now, and the rows are marked `retagged`.

    The directory appears whole, with all files on disk, or not at all. Returns `{"batches", "rows", "bytes"}`. Raises
    `FileExistsError`, `InvalidInput` for a step that was not marked and a `<dir>.tmp` that is no draft, `RowCleared` (a
    `StorageKeyNotFoundError`) when rows of it were cleared, `CellsChanged` when fields that the task took were written
    anew, `NotInitialized` (a RuntimeError), OSError.
    """
    return bundles.save(_session(), directory, step, task_name)


def read_row_index(dump_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """What a dump holds, without reading the rows: `{"partition_id", "rows": {key: {global_index, fields, tag}}}`.

    No service is needed. Raises as `load_data_by_key`.
    """
    return dump.read_index(dump_dir)


def table(
    partition_id: str,
    fields: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    tags: Sequence[str] | None = None,
    as_bytes: Sequence[str] = (),
    preview_chars: int | None = 1024,
) -> Any:
    """The rows of a partition as a `PartitionTable` of Arrow, which pandas, polars, DuckDB and pyarrow read
    (docs/tables.md).

    Columns: `global_index`, `key`, one for each of `fields`, `tag_NAME` for each of `tags` (None: all there are).
    `keys`: only these rows. Numbers and tensors are numbers and lists; strings are text; of other objects, and of
    fields with rows of several kinds, there is a text of at most `preview_chars` characters (None: all). Fields of
    objects in `as_bytes` are bytes: bytes, strings, files of images. The rows are those of now, their cells are read
    when the table is; nothing in the service changes. Needs the extra `arrow`.

    Raises `UnknownRows` for a partition or key that does not exist, `InvalidInput` for a field that does not,
    `NotSupported` where pyarrow is not installed, `NotInitialized`.
    """
    extras.require("arrow", "a table")
    from transfer_queue.tables.partition_table import table as table_of

    return table_of(_session(), partition_id, fields, keys, tags, as_bytes, preview_chars)


def sql(query: str) -> Any:
    """What a query of SQL gives, as a table of pyarrow. Every partition is a table of DuckDB with the columns of
    `table`, under its name; of what the query does not name nothing is read. SQL reaches neither files nor network.

    Needs the extra `sql`. Raises `InvalidInput` for a query that DuckDB refuses, and as `table`.
    """
    extras.require("sql", "SQL")
    from transfer_queue.tables.queries import sql as result_of

    return result_of(_session(), query)


def overview_table(what: str) -> Any:
    """What `client.overview()` lists, as a table of pyarrow, which pandas, polars and DuckDB read: "partitions",
    "fields", "tasks", "waits", "leases", "sessions", "sources" (of groups) or "replicas" (docs/tables.md).

    Sessions are hexadecimal. At most 16,384 waits and leases. Needs the extra `arrow`. Raises `InvalidInput` for
    another `what`, `NotSupported` where pyarrow is not installed, `NotInitialized`.
    """
    extras.require("arrow", "a table")
    from transfer_queue.tables.overview_table import overview_table as table_of

    return table_of(_session(), what)


def export_table(
    partition_id: str,
    target: str | os.PathLike[str],
    format: str = "parquet",
    columns: Sequence[str] | None = None,
    as_bytes: Sequence[str] = (),
    preview_chars: int | None = None,
    overwrite: bool = False,
) -> dict[str, int]:
    """Write the table of a partition, or some of its columns, as Parquet: to a file of that name, or to a new directory
    of files; with `format="hf"` to a directory that `datasets.load_dataset` of Hugging Face reads, with "hf-disk" to
    one of Arrow's files for `datasets.load_from_disk`.

    Written beside its place and renamed, on disk when this returns. `overwrite` replaces a file, never a directory.
    Returns `{"rows", "files", "bytes"}`. Raises `FileExistsError`, `NotSupported` where polars is not installed, and as
    `table`; OSError.
    """
    extras.require("parquet", "an export")
    from transfer_queue.tables.export import ExportForm, export

    return export(_session(), partition_id, target, ExportForm(format, columns, as_bytes, preview_chars, overwrite))
