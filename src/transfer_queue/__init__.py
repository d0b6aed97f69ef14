"""The data plane of RL post-training: samples stream from rollout to trainer, at memory speed.

Everything public is reachable from here and loaded on first use, so that a server process never loads torch.

    cli                       the command `tq`
    page                      a page in a browser that shows a running service
    integrations              parts of other frameworks that run ours
    bridge                    batches of rollouts to data-parallel ranks, and back
    dataloader                torch datasets over a partition that others are still filling
    weights                   versions of the weights, from trainers to running modules
    locks                     locks on keys, for those who agree to ask for them
    utils, controller_actor   import paths of TransferQueue that programs use
    interface                 the functions of the package: this process's one connection to the service
    bundles                   what a task took for a step of its loop, as files that need no service
    tables                    partitions as tables of Arrow: for data frames, SQL and Parquet
    dump                      chosen rows as files, and back
    doctor                    a trial of a backend between hosts, before a job
    launch                    finding the service of this job, or starting one
    config                    settings: `config.yaml`, merged and checked
    checkpoint                everything in a service as files, and back
    client                    the library inside a worker's process
    server                    the server process around the controller and one storage unit
    controller                which cells are ready, where they are, and who consumed what
    storage                   where the bytes of rows live
    sampler                   which ready rows a request gets
    wire                      what crosses a socket
    codec                     columns to bytes and back
    saved                     folders of files that appear whole, on a disk or in a store, and are read as written
    groups                    groups of siblings: slots, attempts, and which ones a policy serves
    metadata, schema          what a batch is, apart from its data; what a field is
    memory                    bulk memory of a process
    errors, names, arguments  every error, as one tree; which name was probably meant; arguments as callers give them
    claims, wait_queue        who has which names; requests that wait
    structs                   structs that are decoded on their own
    trace                     what processes did and when, as files that join to one timeline
    background_call           a call that somebody else may never answer

What stands above may import what stands below (`pyproject.toml` has the exact layers).
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_queue.client.client import TransferQueueClient as TransferQueueClient
    from transfer_queue.client.dense import Padding as Padding
    from transfer_queue.client.dense import to_dense as to_dense
    from transfer_queue.codec.registry import register_type as register_type
    from transfer_queue.codec.slices import Slice as Slice
    from transfer_queue.dataloader import StreamingDataLoader as StreamingDataLoader
    from transfer_queue.dataloader import StreamingDataset as StreamingDataset
    from transfer_queue.dataloader import async_stream as async_stream
    from transfer_queue.dataloader import replay as replay
    from transfer_queue.dataloader import stream as stream
    from transfer_queue.errors import LockLostError as LockLostError
    from transfer_queue.errors import StorageKeyNotFoundError as StorageKeyNotFoundError
    from transfer_queue.groups import GroupPolicy as GroupPolicy
    from transfer_queue.interface import address as address
    from transfer_queue.interface import admit as admit
    from transfer_queue.interface import async_admit as async_admit
    from transfer_queue.interface import async_finish_partition as async_finish_partition
    from transfer_queue.interface import async_give_back as async_give_back
    from transfer_queue.interface import async_kv_batch_get as async_kv_batch_get
    from transfer_queue.interface import async_kv_batch_get_by_meta as async_kv_batch_get_by_meta
    from transfer_queue.interface import async_kv_batch_put as async_kv_batch_put
    from transfer_queue.interface import async_kv_clear as async_kv_clear
    from transfer_queue.interface import async_kv_empty as async_kv_empty
    from transfer_queue.interface import async_kv_list as async_kv_list
    from transfer_queue.interface import async_kv_put as async_kv_put
    from transfer_queue.interface import async_kv_update as async_kv_update
    from transfer_queue.interface import async_kv_watch as async_kv_watch
    from transfer_queue.interface import async_open_partition as async_open_partition
    from transfer_queue.interface import async_series_status as async_series_status
    from transfer_queue.interface import async_set_weight_version as async_set_weight_version
    from transfer_queue.interface import close as close
    from transfer_queue.interface import dump_data_by_key as dump_data_by_key
    from transfer_queue.interface import export_table as export_table
    from transfer_queue.interface import finish_partition as finish_partition
    from transfer_queue.interface import get_client as get_client
    from transfer_queue.interface import get_metrics_endpoint as get_metrics_endpoint
    from transfer_queue.interface import give_back as give_back
    from transfer_queue.interface import group_pool as group_pool
    from transfer_queue.interface import init as init
    from transfer_queue.interface import kv_batch_get as kv_batch_get
    from transfer_queue.interface import kv_batch_get_by_meta as kv_batch_get_by_meta
    from transfer_queue.interface import kv_batch_put as kv_batch_put
    from transfer_queue.interface import kv_clear as kv_clear
    from transfer_queue.interface import kv_empty as kv_empty
    from transfer_queue.interface import kv_list as kv_list
    from transfer_queue.interface import kv_put as kv_put
    from transfer_queue.interface import kv_update as kv_update
    from transfer_queue.interface import kv_watch as kv_watch
    from transfer_queue.interface import load_checkpoint as load_checkpoint
    from transfer_queue.interface import load_data_by_key as load_data_by_key
    from transfer_queue.interface import open_partition as open_partition
    from transfer_queue.interface import overview_table as overview_table
    from transfer_queue.interface import read_row_index as read_row_index
    from transfer_queue.interface import save_checkpoint as save_checkpoint
    from transfer_queue.interface import save_step as save_step
    from transfer_queue.interface import series_status as series_status
    from transfer_queue.interface import set_weight_version as set_weight_version
    from transfer_queue.interface import sql as sql
    from transfer_queue.interface import table as table
    from transfer_queue.locks import async_kv_global_lock as async_kv_global_lock
    from transfer_queue.locks import async_kv_global_locked as async_kv_global_locked
    from transfer_queue.locks import async_kv_local_lock as async_kv_local_lock
    from transfer_queue.locks import async_kv_local_locked as async_kv_local_locked
    from transfer_queue.locks import async_kv_lock_list as async_kv_lock_list
    from transfer_queue.locks import kv_global_lock as kv_global_lock
    from transfer_queue.locks import kv_global_locked as kv_global_locked
    from transfer_queue.locks import kv_local_lock as kv_local_lock
    from transfer_queue.locks import kv_local_locked as kv_local_locked
    from transfer_queue.locks import kv_lock_list as kv_lock_list
    from transfer_queue.metadata import BatchMeta as BatchMeta
    from transfer_queue.metadata import KVBatchMeta as KVBatchMeta
    from transfer_queue.sampler import BaseSampler as BaseSampler
    from transfer_queue.sampler import GRPOGroupNSampler as GRPOGroupNSampler
    from transfer_queue.sampler import RankAwareSampler as RankAwareSampler
    from transfer_queue.sampler import SeqlenBalancedSampler as SeqlenBalancedSampler
    from transfer_queue.sampler import SequentialSampler as SequentialSampler
    from transfer_queue.sampler import StreamingTokenBudgetSampler as StreamingTokenBudgetSampler

_HOMES = {
    "transfer_queue.interface": (
        "init", "close", "address", "get_client", "get_metrics_endpoint", "kv_put", "kv_batch_put", "kv_batch_get",
        "kv_batch_get_by_meta", "kv_list", "kv_clear", "async_kv_put", "async_kv_batch_put", "async_kv_batch_get",
        "async_kv_batch_get_by_meta", "async_kv_list", "async_kv_clear", "kv_watch", "async_kv_watch",
        "kv_update", "async_kv_update", "kv_empty", "async_kv_empty", "dump_data_by_key", "load_data_by_key",
        "read_row_index", "save_step",
        "save_checkpoint", "load_checkpoint", "set_weight_version", "async_set_weight_version", "admit", "async_admit",
        "give_back", "async_give_back", "group_pool", "open_partition", "async_open_partition", "finish_partition",
        "async_finish_partition", "series_status", "async_series_status", "table", "sql", "export_table",
        "overview_table",
    ),
    "transfer_queue.groups": ("GroupPolicy",),
    "transfer_queue.client.client": ("TransferQueueClient",),
    "transfer_queue.client.dense": ("Padding", "to_dense"),
    "transfer_queue.codec.registry": ("register_type",),
    "transfer_queue.codec.slices": ("Slice",),
    "transfer_queue.dataloader": ("StreamingDataset", "StreamingDataLoader", "stream", "async_stream", "replay"),
    "transfer_queue.errors": ("LockLostError", "StorageKeyNotFoundError"),
    "transfer_queue.locks": (
        "kv_local_lock", "async_kv_local_lock", "kv_global_lock", "async_kv_global_lock", "kv_local_locked",
        "async_kv_local_locked", "kv_global_locked", "async_kv_global_locked", "kv_lock_list", "async_kv_lock_list",
    ),
    "transfer_queue.metadata": ("BatchMeta", "KVBatchMeta"),
    "transfer_queue.sampler": (
        "BaseSampler", "GRPOGroupNSampler", "RankAwareSampler", "SeqlenBalancedSampler", "SequentialSampler",
        "StreamingTokenBudgetSampler",
    ),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = (
    "client", "config", "controller", "dataloader", "errors", "interface", "metadata", "sampler", "storage", "trace",
    "utils", "weights",
)  # fmt: skip

__all__ = list(_HOME_OF)
__version__ = Path(__file__).with_name("version").joinpath("version").read_text(encoding="utf-8").strip()


_LOAD_S = 10.0
_loading: list[int] = []  # the threads that load something now


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _loaded(f"transfer_queue.{name}")
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module 'transfer_queue' has no attribute {name!r}") from None
    value = getattr(_loaded(home), name)
    globals()[name] = value
    return value


def _loaded(module: str) -> Any:
    _loading.append(threading.get_ident())
    try:
        return importlib.import_module(module)
    finally:
        _loading.remove(threading.get_ident())


def _let_others_load() -> None:
    """A fork waits for them, for a while: a module that another thread imports is locked for good in the child."""
    own, end = threading.get_ident(), time.monotonic() + _LOAD_S
    while any(thread != own for thread in _loading) and time.monotonic() < end:
        time.sleep(0.001)


def _leave_to_parent() -> None:
    own = threading.get_ident()
    _loading[:] = [thread for thread in _loading if thread == own]


os.register_at_fork(before=_let_others_load, after_in_child=_leave_to_parent)


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]


def _warn_of_other_package() -> None:
    """Warn that TransferQueue's files lie among ours: either distribution breaks when the other is removed."""
    import warnings

    from transfer_queue_doctor import explanation

    text = explanation()
    if text is not None:
        warnings.warn(text, stacklevel=3)


if Path(__file__).with_name("client.py").exists():  # only TransferQueue has one; ours is a folder, and that wins
    _warn_of_other_package()
