"""ROLL's transfer backend, row by row: the functions of `roll.distributed.scheduler.transfer_backend`.

from transfer_queue.integrations import roll
roll.install()  # in every process of ROLL, as by Ray's worker_process_setup_hook

A process attaches to the run's service with its first call, and one that was forked attaches anew. It runs on every
Python that this package runs on.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue.errors import ConfigError, InvalidInput, NotSupported, UnsupportedValue

MODULE = "roll.distributed.scheduler.transfer_backend"
BATCHES = "roll.distributed.scheduler.remote_protocol"
NAME = "TransferQueue"

_is_off = False  # whether this process was told that there is no backend


class BackendArguments(Protocol):
    """What ROLL's `TransferBackendArguments` has."""

    backend_name: str | None
    backend_config: Any


@dataclass
class RowBatch:
    """Stands in for ROLL's `RowRemoteBatch` where that is not installed: rows that are read when they are needed.

    `cache` has columns that are here already; it does not travel with a pickle.
    """

    partition: str
    device: torch.device | None
    fields: set[str]
    ids: list[str]
    cache: TensorDict | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def row_ids(self) -> list[str]:
        return self.ids

    def __reduce__(self) -> tuple[Any, ...]:
        return RowBatch, (self.partition, self.device, self.fields, self.ids)

    def materialize(self, fields: Iterable[str] | None = None) -> TensorDict:
        """These columns (default: all), read where they are not here. Raises as `get`."""
        wanted = sorted(self.fields) if fields is None else list(fields)
        here = {} if self.cache is None else {name: self.cache.get(name) for name in self.cache.keys()}  # noqa: SIM118
        missing = [name for name in wanted if name not in here]
        if missing:
            found = get(self.partition, self.ids, missing)
            here |= {name: found.get(name) for name in missing}
            self.cache = TensorDict(here, batch_size=[len(self)])
        return TensorDict({name: here[name] for name in wanted}, batch_size=[len(self)])

    def drop(self) -> None:
        """Clear the rows."""
        delete(self.partition, self.ids, sorted(self.fields))


class RowBackend:
    """What ROLL calls in a process, in the place of its own `TransferQueueClient`."""

    def put(self, partition: str, row_ids: list[str], fields: Mapping[str, Any], batch_size: int) -> Any:
        return put(partition, row_ids, fields, batch_size)

    def get(self, partition: str, keys: list[str], fields: list[str]) -> TensorDict:
        return get(partition, keys, fields)

    def delete(self, partition: str, keys: list[str], fields: list[str]) -> None:
        delete(partition, keys, fields)


def init_transfer_backend(config: BackendArguments | None) -> None:
    """Start the run's service, or attach to it, where `config` names TransferQueue; `backend_config` are the settings.
    With None, or no name, there is no backend: `put` gives None, and nothing can be read.

    Raises `ConfigError` (a ValueError) for another backend or bad settings, `ServiceUnavailable`.
    """
    global _is_off
    name = None if config is None else config.backend_name
    if name not in (None, NAME):
        raise ConfigError(f"backend_name {name!r}: expected {NAME!r} or None")
    if config is not None and name is not None:
        tq.init(config.backend_config)
    _is_off = name is None


def put(partition: str, row_ids: Sequence[str], fields: Mapping[str, Any], batch_size: int) -> Any:
    """Write tensors and arrays by row, one id for each; a batch that can be read elsewhere. None without a backend.

    Rows of an array come back as a stack of objects. Atomic. Raises `UnsupportedValue` (a TypeError) for columns that
    are neither, `InvalidInput` (a ValueError) for sizes that differ, ids that repeat, and no columns; nothing is stored
    then, nor of a batch without rows.
    """
    if _is_off:
        return None
    columns = as_columns(fields)
    if columns.batch_size[0] != batch_size:
        raise InvalidInput(f"a batch of {batch_size} rows with columns of {columns.batch_size[0]}")
    if batch_size or row_ids:
        tq.kv_batch_put(list(row_ids), partition, columns)
    return _remote_batch(partition, list(row_ids), columns)


def get(partition: str, keys: Sequence[str], fields: Sequence[str]) -> TensorDict:
    """The rows of `keys`, which may repeat, in their order: exactly these fields. Tensors are plain ones. Of no keys
    the fields are empty tensors, whatever they are elsewhere.

    Raises `UnknownRows`, and `NotReady` where a row lacks a field (ValueErrors), `InvalidInput` for rows of different
    shape, `NotSupported` (a RuntimeError) without a backend.
    """
    _check_is_on()
    if not fields or not keys:
        return TensorDict({name: torch.empty(0) for name in fields}, batch_size=[len(keys)])
    return tq.kv_batch_get(list(keys), partition, list(fields), strict=True, dense=True)


def delete(partition: str, keys: Sequence[str], fields: Sequence[str]) -> None:
    """Clear the rows of `keys`, with all their fields. Those that do not exist are left out. Raises `NotSupported` (a
    RuntimeError) without a backend."""
    _check_is_on()
    if keys:
        tq.kv_clear(list(keys), partition)


def as_columns(fields: Mapping[str, Any]) -> TensorDict:
    """Tensors as they are, rows of arrays as objects. Raises as `put`."""
    sizes: dict[str, int] = {}
    for name, column in fields.items():
        if not isinstance(column, (torch.Tensor, np.ndarray)):
            raise UnsupportedValue(f"field {name!r} is a {type(column).__qualname__}: expected a tensor or an array")
        if column.ndim == 0:
            raise InvalidInput(f"field {name!r} has no rows")
        sizes[name] = int(column.size(0)) if isinstance(column, torch.Tensor) else len(column)  # nested: no shape
    if len(set(sizes.values())) != 1:
        raise InvalidInput(f"fields with the same number of rows, one at least: got {sizes}")
    columns = {
        name: column if isinstance(column, torch.Tensor) else NonTensorStack(*column) for name, column in fields.items()
    }
    return TensorDict(columns, batch_size=[next(iter(sizes.values()))])


def _remote_batch(partition: str, row_ids: list[str], columns: TensorDict) -> Any:
    names = list(columns.keys())
    if importlib.util.find_spec("roll") is None:
        return RowBatch(partition, columns.device, set(names), row_ids, columns)
    kind = importlib.import_module(BATCHES).RowRemoteBatch
    return kind(partition=partition, device=columns.device, fields=names, row_ids=row_ids, cache=columns)


def _check_is_on() -> None:
    if _is_off:
        raise NotSupported("this process has no transfer backend: init_transfer_backend was told so")


def install() -> None:
    """Have ROLL's own functions use this backend where its settings name TransferQueue, on any Python. What it does
    about other backends, and how its processes hear of the settings, stays. Doing it twice changes nothing.

    Raises ImportError without ROLL, `NotSupported` for a release of it without `TransferQueueClient` there.
    """
    module: Any = importlib.import_module(MODULE)
    if not hasattr(module, "TransferQueueClient"):
        raise NotSupported(f"this ROLL has no TransferQueueClient in {MODULE}")
    module.tq, module.TransferQueueClient = tq, RowBackend
