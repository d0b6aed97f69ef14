"""Settings: config.yaml, merged with what `init` got, checked, and split into what server and clients need."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transfer_queue.errors import ConfigError, TransferQueueError
from transfer_queue.sampler import resolve
from transfer_queue.server.settings import ServerConfig

MEMORY_SHARE = 0.6


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The environment variables that count. `address`: TQ_ADDRESS, where the service is. `run_dir`: TQ_RUN_DIR, as the
    setting of that name. `reserved_rows`: TQ_PRE_ALLOC_SAMPLE_NUM, rows a partition has from the start."""

    address: str
    run_dir: str
    reserved_rows: int


def from_env() -> Environment:
    text = os.environ.get("TQ_PRE_ALLOC_SAMPLE_NUM", "1")
    if not text.isdigit():
        raise ConfigError(f"TQ_PRE_ALLOC_SAMPLE_NUM={text!r}: expected a whole number")
    return Environment(
        address=os.environ.get("TQ_ADDRESS", ""),
        run_dir=os.environ.get("TQ_RUN_DIR", ""),
        reserved_rows=int(text),
    )


def merged(conf: Any) -> Any:
    """The DictConfig of config.yaml with `conf` (a DictConfig, mapping or None) over it."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    default = OmegaConf.load(Path(__file__).with_name("config.yaml"))
    default._set_flag("allow_objects", True)
    if conf is None:
        return default
    if not isinstance(conf, (DictConfig, Mapping)):
        raise ConfigError(f"conf is a DictConfig or a mapping, got {type(conf).__qualname__}")
    try:
        given = conf if isinstance(conf, DictConfig) else OmegaConf.create(dict(conf), flags={"allow_objects": True})
        return OmegaConf.merge(default, given)
    except OmegaConfBaseException as error:
        raise ConfigError(f"conf does not fit config.yaml: {error}") from error


class ConfigMismatch(UserWarning):
    """`init` attached to a service that runs with other settings than it was given; the service's hold."""


NOT_COMPARED = ("address", "run_dir", "controller.zmq_info", "backend.SimpleStorage.zmq_info")


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
    """What a server is started with. Raises `ConfigError` naming the setting that is wrong."""
    backend = str(conf.backend.storage_backend)
    if backend != "SimpleStorage":
        raise ConfigError(f"backend.storage_backend: {backend!r} is not available; this release has SimpleStorage")
    simple = conf.backend.SimpleStorage
    host = str(conf.server.host or "")
    return ServerConfig(
        run_dir=run_dir,
        owner_pid=owner_pid,
        host=host,
        port=_number(conf.server.port, "server.port", 0),
        token=_token(conf.server.token_file) if host else "",
        budget_nbytes=_number(simple.budget_nbytes, "backend.SimpleStorage.budget_nbytes", 1) or default_budget(),
        max_rows=_number(simple.total_storage_size, "backend.SimpleStorage.total_storage_size", 1),
        reserved_rows=from_env().reserved_rows,
        trim_after_s=_seconds(simple.trim_after_s, "backend.SimpleStorage.trim_after_s"),
        arena_dir=None if simple.arena_dir is None else str(simple.arena_dir),
        sampler=resolve(conf.controller.sampler),
        client={
            "polling_mode": bool(conf.controller.polling_mode),
            "timeout_s": _seconds(conf.client.timeout_s, "client.timeout_s"),
            "allow_pickle": bool(conf.client.allow_pickle),
            "spin_s": (_number(conf.client.spin_us, "client.spin_us", 0) or 0) / 1e6,
            "copy_threads": _number(conf.client.copy_threads, "client.copy_threads", 1),
            "pool_nbytes": _number(conf.client.pool_nbytes, "client.pool_nbytes", 0),
            "settings": plain(conf),
        },
    )


def default_budget() -> int:
    """A share of the memory this process may use: the machine's, or its control group's when that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # no such control group, or "max"
    return int(min(limits) * MEMORY_SHARE)


def _number(value: Any, name: str, least: int) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    return value


def _seconds(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise ConfigError(f"{name}: expected a number of seconds above 0, got {value!r}")
    return float(value)


def _token(path: Any) -> str:
    if path is not None:
        try:
            token = Path(str(path)).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"server.token_file: {error}") from error
    else:
        from transfer_queue.client.address import token_from_environment

        token = token_from_environment()
    if not token:
        raise ConfigError(
            "server.host is set without a token: name server.token_file, or set TQ_TOKEN or TQ_TOKEN_FILE"
        )
    return token
