"""Settings: config.yaml, merged with what `init` got, checked, and split into what server and clients need."""

from __future__ import annotations

import copy
import difflib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast, get_args

from transfer_queue.errors import ConfigError, TransferQueueError
from transfer_queue.names import near
from transfer_queue.sampler import resolve
from transfer_queue.server.settings import (
    AWAY_S,
    DOOR_NAME,
    LASTING_AWAY_S,
    MAX_SOCKET_PATH,
    Durability,
    ServerConfig,
)
from transfer_queue.storage.engines import engine_class
from transfer_queue.storage.engines.offload import offload_settings
from transfer_queue.wire.address import is_everywhere, parse_address
from transfer_queue.wire.messages.staleness import Policy
from transfer_queue.wire.token import token_from_environment, token_from_file

T = TypeVar("T")
FOREIGN = frozenset({"enable", "enabled", "_target_"})  # keys that frameworks keep beside ours, at the top
FREE = frozenset({"backend.Yuanrong.ucx_env_vars"})  # any keys may follow
ENGINE_SECTIONS = ("Files", "MooncakeStore", "RayStore", "Yuanrong")
OF_POOL = ("metadata_server", "master_server_address", "global_segment_size")
SECTIONS = (
    "metrics", "controller", "controller.staleness", "backend", "backend.SimpleStorage",
    "backend.SimpleStorage.ssd_offload", "backend.Files", "backend.MooncakeStore", "backend.Yuanrong",
    "client", "server",
)  # fmt: skip


VARIABLES = (
    "TQ_ADDRESS", "TQ_RUN_DIR", "TQ_PRE_ALLOC_SAMPLE_NUM", "TQ_NUM_THREADS", "TQ_LOGGING_LEVEL", "TQ_ALLOW_PICKLE",
    "TQ_TRACE", "TQ_OTEL", "TQ_TOKEN", "TQ_TOKEN_FILE", "TQ_UNIT_TOKEN", "TQ_UNIT_TOKEN_FILE", "TQ_WEIGHTS_ROOT",
    "TQ_ZERO_COPY_SERIALIZATION",
)  # fmt: skip


class ConfigWarning(UserWarning):
    """A setting that has no effect, or not the one that its name suggests."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The environment variables that count. `address`: TQ_ADDRESS, where the service is. `run_dir`: TQ_RUN_DIR, as the
    setting of that name. `reserved_rows`: TQ_PRE_ALLOC_SAMPLE_NUM, rows a partition has from the start.
    `copy_threads`: TQ_NUM_THREADS, for `client.copy_threads` (None: not set). `logging_level`: TQ_LOGGING_LEVEL, of the
    server's log and of the logger "transfer_queue" ("": not set). `allow_pickle`: TQ_ALLOW_PICKLE, whether this process
    pickles and unpickles where its own `client.allow_pickle` is null. `trace`: TQ_TRACE, the folder that the processes
    of the job record their spans to ("": none). `otel`: TQ_OTEL, whether operations of clients are spans of
    OpenTelemetry, where its API is installed."""

    address: str
    run_dir: str
    reserved_rows: int
    copy_threads: int | None
    logging_level: str
    allow_pickle: bool
    trace: str
    otel: bool


def from_env() -> Environment:
    level = os.environ.get("TQ_LOGGING_LEVEL", "").upper()
    if level and not isinstance(logging.getLevelName(level), int):
        raise ConfigError(f"TQ_LOGGING_LEVEL={level!r}: expected DEBUG, INFO, WARNING, ERROR or CRITICAL")
    return Environment(
        address=os.environ.get("TQ_ADDRESS", ""),
        run_dir=os.environ.get("TQ_RUN_DIR", ""),
        reserved_rows=_whole("TQ_PRE_ALLOC_SAMPLE_NUM", 1),
        copy_threads=_whole("TQ_NUM_THREADS", None),
        logging_level=level,
        allow_pickle=_switch("TQ_ALLOW_PICKLE"),
        trace=os.environ.get("TQ_TRACE", ""),
        otel=_switch("TQ_OTEL"),
    )


def _whole(name: str, otherwise: T) -> int | T:
    """The whole number an environment variable gives."""
    text = os.environ.get(name)
    if text is None:
        return otherwise
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r}: expected a whole number")
    return int(text)


def _switch(name: str) -> bool:
    text = os.environ.get(name) or "0"
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text!r}: expected 0 or 1")
    return text == "1"


def merged(conf: Any) -> Any:
    """The DictConfig of config.yaml with `conf` (a DictConfig, mapping or None) over it."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    default = _default()
    default._set_flag("allow_objects", True)
    if conf is None:
        return default
    if not isinstance(conf, (DictConfig, Mapping)):
        raise ConfigError(f"conf is a DictConfig or a mapping, got {type(conf).__qualname__}")
    try:
        given = conf if isinstance(conf, DictConfig) else OmegaConf.create(dict(conf), flags={"allow_objects": True})
        _check_sections(given)
        full = OmegaConf.merge(default, given)
        OmegaConf.to_container(full, resolve=True)  # what refers to nothing is found here, not by whoever reads it
        return full
    except OmegaConfBaseException as error:
        raise ConfigError(f"conf does not fit config.yaml: {error}") from error


def _default() -> Any:
    return copy.deepcopy(_read_default())


@cache  # reading it takes three times as long as a copy
def _read_default() -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.load(Path(__file__).with_name("config.yaml"))


def unknown(conf: Any) -> Iterator[str]:
    """One sentence for each key of `conf` that config.yaml has not, with the nearest one that it has."""
    from omegaconf import DictConfig, OmegaConf

    known: dict[str, bool] = {}  # whether it is a section
    engine = OmegaConf.select(conf, "backend.storage_backend")  # which may be anybody's

    def learn(section: Any, path: str) -> None:
        for key, value in section.items_ex(resolve=False):
            name = f"{path}{key}"
            known[name] = isinstance(value, DictConfig) and name not in FREE
            if known[name]:
                learn(value, f"{name}.")

    def look(section: Any, path: str) -> Iterator[str]:
        for key, value in section.items_ex(resolve=False):
            name = f"{path}{key}"
            if name not in known and name not in FOREIGN and name != f"backend.{engine}":
                near = difflib.get_close_matches(name, known, 1, 0.0)[0]
                yield f"{name} is not a setting and has no effect; the nearest one is {near}"
            elif known.get(name) and isinstance(value, DictConfig):
                yield from look(value, f"{name}.")

    learn(_default(), "")
    return look(conf, "")


def _warn(conf: Any) -> None:
    for text in unknown(conf):
        warnings.warn(text, ConfigWarning, stacklevel=2)


def warn_of_slips() -> None:
    """Warn of each environment variable that is probably a slip for one of ours. A process with a misspelt TQ_ADDRESS
    starts a service of its own, and nothing else says that it is not the job's. Others may have names like ours."""
    for name in sorted(os.environ):
        meant = near(name, VARIABLES) if name.startswith("TQ") and name not in VARIABLES else None
        if meant is not None:
            text = f"the environment variable {name} has no effect; the nearest one is {meant}"
            warnings.warn(text, ConfigWarning, stacklevel=3)


class ConfigMismatch(UserWarning):
    """`init` attached to a service that runs with other settings than it was given; the service's hold."""


NOT_COMPARED = ("address", "run_dir", "client.allow_pickle", "controller.zmq_info", "backend.SimpleStorage.zmq_info")


def plain(conf: Any) -> dict[str, Any]:
    """The settings in a DictConfig or mapping by their dotted names, as values JSON has; a sampler as its spec."""
    from omegaconf import DictConfig, OmegaConf

    found: dict[str, Any] = {}

    def collect(values: Mapping[Any, Any], prefix: str) -> None:
        for key, value in values.items():
            name = f"{prefix}{key}"
            if name == "controller.sampler":
                try:
                    found[name] = resolve(value)
                except TransferQueueError:  # not to be had in this process
                    found[name] = str(value)
            elif isinstance(value, Mapping):
                collect(value, f"{name}.")
            elif name not in NOT_COMPARED and isinstance(value, (str, int, float, type(None))):
                found[name] = value

    collect(OmegaConf.to_container(conf, resolve=True) if isinstance(conf, DictConfig) else conf, "")
    return found


def warn_of_differences(conf: Any, told: Mapping[str, Any]) -> None:
    """Warn with `ConfigMismatch` about settings in `conf` that the service told to be others; unknown ones are not."""
    if not conf:
        return
    running = told.get("settings", {})
    given = plain(conf)
    names = sorted(name for name, value in given.items() if name in running and running[name] != value)
    if names:
        text = ", ".join(f"{name} is {running[name]!r}, not {given[name]!r}" for name in names)
        warnings.warn(f"the running service keeps its settings: {text}", ConfigMismatch, stacklevel=3)


def server_config(conf: Any, run_dir: str, owner_pid: int) -> ServerConfig:
    """What a server is started with. Raises `ConfigError` naming the setting that is wrong, and warns with
    `ConfigWarning` of settings that have no effect."""
    _warn(conf)
    pickling(conf)  # not the server's to know, but a wrong value is refused here as all others are
    engine = _engine(conf)
    simple = conf.backend.SimpleStorage
    host = str(conf.server.host or "")
    join = str(conf.server.join or "")
    if join and parse_address(join).is_local:
        raise ConfigError(f"server.join: {join!r}; expected tcp:HOST:PORT")
    journal_dir = _directory(conf.server.journal_dir, "server.journal_dir")
    durability = _durability(conf.server.durability, journal_dir, engine)
    metrics_port = _port(conf.metrics.port, "metrics.port")
    has_metrics = _flag(conf.metrics.enabled, "metrics.enabled")
    metrics_host = str(conf.metrics.host or "")
    if has_metrics and not metrics_host and is_everywhere(host):
        text = f"server.host is {host}: metrics are on loopback only, unless metrics.host says otherwise"
        warnings.warn(text, ConfigWarning, stacklevel=2)
    environment = from_env()
    return ServerConfig(
        run_dir=run_dir,
        owner_pid=owner_pid,
        host=host,
        port=_port(conf.server.port, "server.port"),
        token=_token(conf.server.token_file) if host or join else "",
        unit_token=_unit_token(conf.server.unit_token_file, bool(join)) if host or join else "",
        join=join,
        budget_nbytes=_number(simple.budget_nbytes, "backend.SimpleStorage.budget_nbytes", 1) or 0,
        max_rows=_number(simple.total_storage_size, "backend.SimpleStorage.total_storage_size", 1),
        reserved_rows=environment.reserved_rows,
        trim_after_s=_seconds(simple.trim_after_s, "backend.SimpleStorage.trim_after_s"),
        arena_dir=None if simple.arena_dir is None else str(simple.arena_dir),
        spill_dir=_spill_dir(simple),
        spill_nbytes=_number(simple.spill_nbytes, "backend.SimpleStorage.spill_nbytes", 1) or 0,
        sampler=resolve(conf.controller.sampler),
        metrics_port=metrics_port if has_metrics else None,
        metrics_host=metrics_host,
        logging_level=environment.logging_level or "WARNING",
        durability=durability,
        journal_dir=journal_dir,
        **_backend(conf, engine),
        away_s=_away_s(conf.server.away_s, journal_dir is not None),
        spin_s=(_number(conf.server.spin_us, "server.spin_us", 0) or 0) / 1e6,
        notice_after_s=_times(conf.server.notice_after_s, "server.notice_after_s"),
        staleness=_staleness(conf.controller.staleness),
        max_deliver=_number(conf.controller.max_deliver, "controller.max_deliver", 1),
        client={
            "polling_mode": _flag(conf.controller.polling_mode, "controller.polling_mode"),
            "strict_schema": _flag(conf.controller.strict_schema, "controller.strict_schema"),
            "dedupe": _flag(conf.controller.dedupe, "controller.dedupe"),
            "timeout_s": _seconds(conf.client.timeout_s, "client.timeout_s"),
            "spin_s": (_number(conf.client.spin_us, "client.spin_us", 0) or 0) / 1e6,
            "copy_threads": _number(conf.client.copy_threads, "client.copy_threads", 1)
            or environment.copy_threads
            or None,
            "pool_nbytes": _number(conf.client.pool_nbytes, "client.pool_nbytes", 0),
            "settings": plain(conf),
        },
    )


def pickling(conf: Any) -> bool | None:
    """What merged settings say of pickling in this process; None: nothing, TQ_ALLOW_PICKLE counts then."""
    value = conf.client.allow_pickle
    return None if value is None else _flag(value, "client.allow_pickle")


def _staleness(section: Any) -> Policy:
    name = "controller.staleness"
    if section.untagged not in ("accept", "refuse"):
        raise ConfigError(f"{name}.untagged: expected accept or refuse, got {section.untagged!r}")
    return Policy(
        _number(section.max_age, f"{name}.max_age", 0),
        section.untagged,
        _number(section.rows_per_version, f"{name}.rows_per_version", 1),
    )


def _spill_dir(simple: Any) -> str | None:
    """`spill_dir`, or what TransferQueue calls so."""
    name = "backend.SimpleStorage.ssd_offload"
    ours = _directory(simple.spill_dir, "backend.SimpleStorage.spill_dir")
    if simple.spill_nbytes is not None and ours is None and not simple.ssd_offload.enabled:
        raise ConfigError("backend.SimpleStorage.spill_nbytes: where to? Name backend.SimpleStorage.spill_dir")
    theirs = _directory(simple.ssd_offload.path, f"{name}.path")
    if not _flag(simple.ssd_offload.enabled, f"{name}.enabled"):
        return ours
    if ours is None and theirs is None:
        raise ConfigError(f"{name}.enabled: where to? Name backend.SimpleStorage.spill_dir, or {name}.path")
    if None not in (ours, theirs) and ours != theirs:
        raise ConfigError(f"{name}.path: {theirs!r}, but spill_dir is {ours!r}")
    return ours or theirs


def _directory(value: Any, name: str) -> str | None:
    value = str(value) if isinstance(value, PurePath) else value
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name}: expected a directory, got {value!r}")
    if value is not None and not value.strip():
        raise ConfigError(f"{name}: an empty path; null is none")
    if value is not None and "://" in value:  # it would be a directory of that name, below the current one
        raise ConfigError(f"{name}: {value!r} is a URL, expected a directory of this host (docs/durability.md)")
    return None if value is None else os.path.abspath(os.path.expanduser(value))


def run_dir(value: Any) -> str:
    """A run directory that was named, as a path that is the same for every process; "" where none was. Raises
    `ConfigError` where its sockets cannot have names."""
    path = _directory(str(value) if value else None, "run_dir") or ""
    nbytes = len(os.fsencode(os.path.join(path, DOOR_NAME)))
    if nbytes > MAX_SOCKET_PATH:
        raise ConfigError(
            f"run_dir: {path}: a socket there would have a path of {nbytes} bytes, the system takes {MAX_SOCKET_PATH}; "
            "name a shorter one"
        )
    return path


def _away_s(value: Any, has_journal: bool) -> float:
    """What is on a disk is worth waiting for until a machine has started again."""
    if value is None:
        return LASTING_AWAY_S if has_journal else AWAY_S
    return _seconds(value, "server.away_s")


def _backend(conf: Any, engine: str) -> dict[str, Any]:
    return {
        "engine": engine, "engine_settings": engine_settings(conf, engine), "transport": transport(conf),
        "backend_required": bool(conf.backend.required),
    }  # fmt: skip


def _engine(conf: Any) -> str:
    """The storage engine that was chosen ("": none). Raises `ConfigError` for one that there is not."""
    defaults = _default().backend
    _check_engines(conf.backend, defaults)
    _flag(conf.backend.required, "backend.required")
    name = str(conf.backend.storage_backend)
    if name == "SimpleStorage":
        return ""
    if transport(conf):
        _warn_of_pool(conf.backend.MooncakeStore, defaults.MooncakeStore)
        return ""
    try:
        engine_class(name)
    except ImportError as error:
        if not conf.backend.required:
            return name  # the server says so
        raise ConfigError(f"backend.storage_backend: {name} is not installed on this host: {error}") from error
    if conf.backend.SimpleStorage.spill_dir is not None or conf.backend.SimpleStorage.ssd_offload.enabled:
        raise ConfigError(f"backend.SimpleStorage.spill_dir: with {name} large rows are not in memory that could spill")
    return name


def transport(conf: Any) -> dict[str, Any]:
    """How bytes travel between hosts, where that is chosen with the storage (empty: over our connections). With
    MooncakeStore rows lie in each host's memory, unless a pool is to be used or there is one."""
    if str(conf.backend.storage_backend) != "MooncakeStore":
        return {}
    section, name = conf.backend.MooncakeStore, "backend.MooncakeStore"
    is_pooled = not section.auto_init if section.pool is None else section.pool
    if is_pooled:
        return {}
    if section.offload.enabled:
        raise ConfigError(
            f"{name}.offload: is of a pool (pool: true); without one, backend.SimpleStorage.spill_dir names a disk;"
            " expected enabled: false"
        )
    if section.use_gdr:
        raise ConfigError(f"{name}.use_gdr: tensors of a GPU are copied to the host first; expected false")
    names = ("protocol", "device_name", "local_hostname")
    return {"name": "Mooncake", "settings": {name: section[name] for name in names}}


def _warn_of_pool(section: Any, default: Any) -> None:
    """What is set for a pool that there is not."""
    given = [name for name in OF_POOL if section[name] != default[name]]
    if given:
        text = f"backend.MooncakeStore: {', '.join(given)} has no effect without pool: true (docs/backends.md)"
        warnings.warn(text, ConfigWarning, stacklevel=4)


def _check_engines(backend: Any, defaults: Any) -> None:
    """The settings of our own engines have the types of their defaults, whether they are chosen or not."""
    for name in ENGINE_SECTIONS:
        for key, default in defaults[name].items():
            if backend[name] is None:  # as configurations of TransferQueue have RayStore
                continue
            value, where = backend[name][key], f"backend.{name}.{key}"
            if key in ("url", "address", "hard_pin", "pool") and value is None:
                continue
            if isinstance(default, bool) or key in ("hard_pin", "pool"):
                _flag(value, where)
            elif key.endswith("_port"):
                _port(value, where)
            elif isinstance(default, int):
                _number(value, where, 0)
            elif (isinstance(default, str) or key in ("url", "address")) and not isinstance(value, str):
                raise ConfigError(f"{where}: expected text, got {value!r}")
    offload_settings(backend.MooncakeStore.offload)


def engine_settings(conf: Any, engine: str) -> dict[str, Any]:
    """The section of a storage engine in merged settings ("": none). Raises `ConfigError`."""
    from omegaconf import OmegaConf

    section = conf.backend.get(engine) if engine else None
    found = {} if section is None else OmegaConf.to_container(section, resolve=True)
    if not isinstance(found, dict):
        raise ConfigError(f"backend.{engine}: expected a section with settings, got {found!r}")
    return {str(key): value for key, value in found.items()}


def _durability(value: Any, journal_dir: str | None, engine: str) -> Durability:
    survives = _survives(engine)
    if value is None and journal_dir is None:
        return "none" if survives == "none" else "process"
    if survives == "none" and (value != "none" or journal_dir is not None):
        raise ConfigError(f"server.durability: rows that lie in {engine} survive no server; expected none, or null")
    if survives == "process" and (value == "machine" or journal_dir is not None):
        text = f"rows that lie in {engine} do not survive its machine; expected none or process, or null"
        raise ConfigError(f"server.durability: {text}")
    if value is None:
        return "machine"
    if value not in get_args(Durability):
        raise ConfigError(f"server.durability: expected {' or '.join(get_args(Durability))}, got {value!r}")
    if (value == "machine") != (journal_dir is not None):
        needed = "machine needs a directory" if journal_dir is None else "with a directory it is machine, or null"
        raise ConfigError(f"server.durability: {value}, and server.journal_dir is {journal_dir}: {needed}")
    return cast(Durability, value)


def _survives(engine: str) -> Durability:
    """What large rows can survive where they lie."""
    if not engine:
        return "machine"
    try:
        return engine_class(engine).survives
    except ImportError:
        return "none"  # another place takes its place, see `_engine`


def _number(value: Any, name: str, least: int) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    return value


def _port(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ConfigError(f"{name}: expected a port from 0 to 65535, got {value!r}")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected true or false, got {value!r}")
    return value


def _check_sections(given: Any) -> None:
    from omegaconf import DictConfig, OmegaConf

    for name in SECTIONS:
        value = OmegaConf.select(given, name, default={})
        if value != {} and not isinstance(value, DictConfig):
            raise ConfigError(f"{name}: expected a section with settings, got {value!r}")


def _seconds(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise ConfigError(f"{name}: expected a number of seconds above 0, got {value!r}")
    return float(value)


def _times(values: Any, name: str) -> tuple[float, ...]:
    from omegaconf import ListConfig

    if not isinstance(values, ListConfig):
        raise ConfigError(f"{name}: expected a list of seconds, got {values!r}")
    return tuple(sorted(_seconds(value, name) for value in values))


def _token(path: Any) -> str:
    token = token_from_environment() if path is None else token_from_file(str(path), "server.token_file")
    if not token:
        raise ConfigError(
            "server.host or server.join without a token: name server.token_file, or set TQ_TOKEN or TQ_TOKEN_FILE"
        )
    return token


def _unit_token(path: Any, needed: bool) -> str:
    token = (
        token_from_environment("TQ_UNIT_TOKEN")
        if path is None
        else token_from_file(str(path), "server.unit_token_file")
    )
    if not token and needed:
        raise ConfigError(
            "server.join without a unit token: name server.unit_token_file, or set TQ_UNIT_TOKEN or TQ_UNIT_TOKEN_FILE"
        )
    return token
