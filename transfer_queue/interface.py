"""The functions of the package: this process's one connection to the service, key-value interface, checkpoints."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from transfer_queue import checkpoint
from transfer_queue import config as settings
from transfer_queue.client import kv
from transfer_queue.client.api import TransferQueueClient
from transfer_queue.client.drivers import run, run_async
from transfer_queue.client.effects import Operation
from transfer_queue.client.session import Session
from transfer_queue.errors import NotInitialized, ServiceUnavailable
from transfer_queue.launch import local
from transfer_queue.wire.address import parse_address

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.RLock()
_client: TransferQueueClient | None = None
_server: local.LocalServer | None = None


def init(conf: Any = None) -> Any:
    """Attach this process to the service, starting one when there is none. Idempotent, also from many processes.

    The service is looked for at `conf.address`, at the environment variable TQ_ADDRESS (which child processes inherit),
    and in `conf.run_dir`. `conf` is a DictConfig or mapping merged over config.yaml. Returns the merged DictConfig
    when it
    started the service, which then ends with this process, and `conf` itself when it attached. Raises `ConfigError`,
    `ServiceUnavailable`.
    """
    global _client, _server
    with _lock:
        if _client is not None:
            return conf
        full = settings.merged(conf)
        environment = settings.from_env()
        if environment.logging_level:
            logging.getLogger("transfer_queue").setLevel(environment.logging_level)
        known = str(full.address or "") or environment.address
        if known:
            _client = _attached(known)
            return conf
        run_dir = str(full.run_dir or "") or environment.run_dir
        with local.lock(run_dir) if run_dir else contextlib.nullcontext():
            if run_dir:
                with contextlib.suppress(ServiceUnavailable):
                    _client = _attached(run_dir)
                    return conf
            _server = local.start(settings.server_config(full, run_dir, os.getpid()))
        _client = _attached(_server.address)
        os.environ["TQ_ADDRESS"] = full.address = _server.address
        full.metrics.endpoint = _client.session.config["metrics_endpoint"]
        atexit.register(close)
        return full


def _attached(address: str) -> TransferQueueClient:
    return TransferQueueClient(Session(parse_address(address)))


def close() -> None:
    """Detach this process; the one that started the service also ends it. Without a service nothing happens."""
    global _client, _server
    with _lock:
        client, _client = _client, None
        server, _server = _server, None
        if client is not None:
            client.close()
        if server is not None:
            atexit.unregister(close)
            if os.environ.get("TQ_ADDRESS") == server.address:
                del os.environ["TQ_ADDRESS"]
            server.stop()


def get_client() -> TransferQueueClient:
    """The client of this process. Raises `NotInitialized` (an AssertionError) before `init`."""
    if _client is None:
        raise NotInitialized("call transfer_queue.init() first")
    return _client


def get_metrics_endpoint() -> str | None:
    """host:port of the Prometheus metrics; None when they are disabled, and where no service is found."""
    try:
        endpoint: str | None = _session().config.get("metrics_endpoint")
    except NotInitialized:
        return None
    return endpoint


def _session() -> Session:
    """The session of this process, attached on first use when a service can be found."""
    if _client is None:
        environment = settings.from_env()
        if not (environment.address or environment.run_dir):
            raise NotInitialized("TransferQueue is not initialized: call transfer_queue.init(), or set TQ_ADDRESS")
        init()
    return get_client().session


def _plain(operation: Callable[Concatenate[Session, P], Operation[T]]) -> Callable[P, T]:
    @functools.wraps(operation)
    def function(*args: P.args, **kwargs: P.kwargs) -> T:
        session = _session()
        return run(session, operation(session, *args, **kwargs))

    return function


def _async(operation: Callable[Concatenate[Session, P], Operation[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    @functools.wraps(operation)
    async def function(*args: P.args, **kwargs: P.kwargs) -> T:
        session = _session()
        return await run_async(session, operation(session, *args, **kwargs))

    return function


kv_put, async_kv_put = _plain(kv.kv_put), _async(kv.kv_put)
kv_batch_put, async_kv_batch_put = _plain(kv.kv_batch_put), _async(kv.kv_batch_put)
kv_batch_get, async_kv_batch_get = _plain(kv.kv_batch_get), _async(kv.kv_batch_get)
kv_batch_get_by_meta = _plain(kv.kv_batch_get_by_meta)
async_kv_batch_get_by_meta = _async(kv.kv_batch_get_by_meta)
kv_list, async_kv_list = _plain(kv.kv_list), _async(kv.kv_list)
kv_clear, async_kv_clear = _plain(kv.kv_clear), _async(kv.kv_clear)


def save_checkpoint(
    checkpoint_dir: str | os.PathLike[str], *, include_storage: bool = True, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write all partitions, as of one instant, to a directory of this machine. Others go on working meanwhile.

    Replaces an earlier checkpoint there atomically; until then, and when this raises, the earlier one stays.
    `metadata` is kept in metadata.json. Rows are always stored: `include_storage=False` only warns. Blocks until the
    files are on disk. Raises `NotInitialized` (a RuntimeError), `UnsupportedValue` (`metadata` is not JSON),
    `InvalidInput` (the directory holds something else), OSError.
    """
    checkpoint.save(_session(), checkpoint_dir, include_storage, metadata)


def load_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Replace everything in the service by what `save_checkpoint` wrote: one atomic step, after all of it was verified.

    Needs room for both until then. Raises `NotInitialized` (a RuntimeError), `CheckpointMissing` (a FileNotFoundError),
    `CheckpointCorrupt` and `CheckpointUnsupported` (ValueErrors), `InvalidInput` (the service runs another sampler),
    `StoreFull`; nothing has changed then.
    """
    checkpoint.load(_session(), checkpoint_dir)
