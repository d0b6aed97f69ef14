"""Mooncake's distributed store: one object for a block, in memory that the service's server lends it.

Facts behind it, of mooncake-transfer-engine 0.3.13: a key that is written twice keeps its first bytes and says nothing;
what is not hard-pinned is evicted; memory that it reads into or writes from has to be registered; a read whose lease
ends before it does fails although the bytes came. Those of its disk: `offload`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from transfer_queue.errors import ConfigError, ServiceUnavailable, StoreFull
from transfer_queue.memory.bytes import Bytes, address_of
from transfer_queue.memory.pool import Pool
from transfer_queue.storage.engines.engine import BlocksMissing, ReadSpan, Room, StagedRoom, StorageEngine
from transfer_queue.storage.engines.offload import OffloadFolder, OffloadSettings, offload_settings
from transfer_queue.storage.engines.started import Started, free_port, is_listening
from transfer_queue.wire.address import host_towards, parse_address

PEER_TO_PEER = "P2PHANDSHAKE"
FULL, MISSING = -200, -704
NO_BUFFER, NO_FILE, SHORT_FILE = -10, -1101, -1102  # of a read from the disk
PATIENCE_S, PAUSE_S = 60.0, 0.01  # with reads that others are in the way of; whoever calls has given up long before
CLIENT_BUFFER = 16 << 20  # Mooncake's own staging, which none of these calls uses
START_S = 20.0
POOL_NBYTES = 1 << 30  # staging memory that is kept: fresh pages cost more than the copy
SECTION = "backend.MooncakeStore"
_opened_by: set[int] = set()  # processes: the library keeps threads that a forked child has not, and waits for them


class MooncakeStore(StorageEngine):
    """Settings as TransferQueue names them. With `auto_init` the server starts `mooncake_master` at
    `master_server_address` unless one answers there; port 0 is any free one. The server lends `global_segment_size`
    bytes; clients lend none, so that none takes rows with it. With `offload` the server has a directory, too."""

    name = "MooncakeStore"
    can_fork = False

    def __init__(self, settings: Mapping[str, Any], serves: bool) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else it writes thirty lines about every start
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        if _opened_by and os.getpid() not in _opened_by:
            raise ServiceUnavailable(
                f"{self.name} does not work in a process that was forked from one that used it: start it anew (spawn,"
                " forkserver), or fork before the first put or get"
            )
        _opened_by.add(os.getpid())
        self._settings = _checked(settings)
        self._offload = _offload_of(self._settings, serves)
        self._folder: OffloadFolder | None = None
        with contextlib.ExitStack() as opened:
            if serves and self._offload is not None:
                self._folder = OffloadFolder(self._offload.file_storage_path)
                opened.callback(self._folder.close)
                os.environ.update(self._offload.environment())
            master = self._started_master() if serves and self._settings["auto_init"] else None
            if master is not None:
                opened.callback(master.stop)
            self._settings["metadata_server"] = _metadata(self._settings)
            self._address = str(self._settings["master_server_address"])
            self._store: Any = MooncakeDistributedStore()
            opened.callback(self._let_go)
            self._set_up(int(self._settings["global_segment_size"]) if serves else 0)
            self._opened = opened.pop_all()
        self._pinned, self._movable = ReplicateConfig(), ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._pool = Pool(POOL_NBYTES)

    def _set_up(self, lent: int) -> None:
        own = str(self._settings["local_hostname"] or "") or host_towards(parse_address(f"tcp:{self._address}"))
        folder = self._folder.path if self._folder is not None else ""
        code = self._store.setup(
            own if ":" in own else f"{own}:{free_port(own)}", self._settings["metadata_server"], lent, CLIENT_BUFFER,
            self._settings["protocol"], self._settings["device_name"] or "", self._address,
            enable_ssd_offload=bool(folder), ssd_offload_path=folder,
        )  # fmt: skip
        if code:
            more = f", or not with {folder}" if folder else ""
            raise ServiceUnavailable(
                f"{self.name}: no access through the master at {self._address}{more} (error {code}). Is what"
                " listens there a Mooncake master? One is started at a free port where master_server_address has port"
                " 0 at its end"
            )

    @property
    def where(self) -> str:
        return self._address

    @property
    def for_clients(self) -> Mapping[str, Any]:
        return self._settings | {"auto_init": False, "local_hostname": ""}

    def reserve(self, key: str, nbytes: int) -> Room:
        return StagedRoom(self._pool.allocate(nbytes), lambda memory: self.put(key, memory))

    def put(self, key: str, memory: Bytes) -> None:
        can_move = self._offload is not None and len(memory) <= self._offload.max_nbytes
        config = self._movable if can_move else self._pinned
        with self._registered([memory]):
            code = self._store.batch_put_from([key], [address_of(memory)], [len(memory)], config)[0]
        if code == FULL:
            more = ", and the disk behind them is, too, or not as fast (offload)" if can_move else ""
            raise StoreFull(f"{len(memory)} bytes do not fit: its segments are full (global_segment_size){more}")
        if code:
            raise OSError(f"error {code} while {key} was written")

    def read(self, spans: Sequence[ReadSpan]) -> None:
        on_disk = self._on_disk({span.key for span in spans})
        failed = self._read_memory([span for span in spans if span.key not in on_disk])
        on_disk |= self._on_disk(failed.keys())  # those that were moved meanwhile
        for key in on_disk:
            self._read_disk(key, [span for span in spans if span.key == key])
        for key in failed.keys() - on_disk:
            raise OSError(failed[key])

    def _on_disk(self, keys: Collection[str]) -> set[str]:
        """Those that are only there. What is in memory stays for a while."""
        if self._offload is None or not keys:
            return set()
        found = self._store.batch_get_replica_desc(list(keys))
        missing = {key for key in keys if not found.get(key)}
        if missing:
            raise BlocksMissing(missing)
        return {key for key in keys if not any(replica.is_memory_replica() for replica in found[key])}

    def _read_memory(self, spans: Sequence[ReadSpan]) -> dict[str, str]:
        """What failed, by its key."""
        if not spans:
            return {}
        pointers = [address_of(span.into) for span in spans]
        with self._registered([span.into for span in spans]):
            found = self._store.get_into_ranges(
                pointers, [[span.key] for span in spans], [[[0]] for _ in spans], [[[span.offset]] for span in spans],
                [[[len(span.into)]] for span in spans],
            )  # fmt: skip
        counts = [_first(one) for one in found]
        missing = {span.key for span, count in zip(spans, counts, strict=True) if count == MISSING}
        if missing:
            raise BlocksMissing(missing)
        return {
            span.key: f"error {count} while {len(span.into)} bytes of {span.key} were read"
            for span, count in zip(spans, counts, strict=True)
            if count != len(span.into)
        }

    def _read_disk(self, key: str, spans: Sequence[ReadSpan]) -> None:
        """Whole, for Mooncake reads no part of what is there."""
        size = self._store.get_size(key)
        if size == MISSING:
            raise BlocksMissing({key})
        if size < max(span.offset + len(span.into) for span in spans):
            raise OSError(f"{key} has {size} bytes, which are too few")
        is_direct = len(spans) == 1 and len(spans[0].into) == size
        memory = spans[0].into if is_direct else self._pool.allocate(size)
        deadline = time.monotonic() + PATIENCE_S
        with self._registered([memory]):
            while True:
                code = self._store.batch_get_into([key], [address_of(memory)], [size])[0]
                if code != NO_BUFFER or time.monotonic() > deadline:
                    break
                time.sleep(PAUSE_S)
        if code in (MISSING, NO_FILE, SHORT_FILE):
            raise BlocksMissing({key})
        if code != size:
            raise OSError(f"error {code} while {key} was read from the disk")
        for span in () if is_direct else spans:
            span.into[:] = memory[span.offset : span.offset + len(span.into)]

    def missing(self, keys: Sequence[str]) -> set[str]:
        found = self._store.batch_is_exist(list(keys))
        if any(code not in (0, 1) for code in found):
            raise OSError(f"error {min(found)} while {len(keys)} keys were looked up")
        missing = {key for key, code in zip(keys, found, strict=True) if code == 0}
        if self._folder is None:
            return missing
        on_disk = self._on_disk(set(keys) - missing)
        return missing | {key for key in on_disk if not self._folder.has(key, self._store.get_size(key))}

    def drop(self, keys: Sequence[str]) -> None:
        codes = set(self._store.batch_remove(list(keys), True)) - {0, MISSING}
        if codes:
            raise OSError(f"error {min(codes)} while {len(keys)} keys were deleted")
        if self._folder is not None:
            self._folder.delete(keys)

    def close(self) -> None:
        self._opened.close()

    def _let_go(self) -> None:
        self._store.close()
        self._store = None  # its threads end with it

    @contextlib.contextmanager
    def _registered(self, parts: Sequence[Bytes]) -> Iterator[None]:
        """Every memory that one of the parts is of, registered once: Mooncake refuses what overlaps."""
        ranges: dict[int, tuple[int, int]] = {}
        for part in parts:
            owner = part if part.base is None else part.base
            start, end = address_of(part), address_of(part) + len(part)
            low, high = ranges.get(id(owner), (start, end))
            ranges[id(owner)] = min(low, start), max(high, end)
        done: list[int] = []
        try:
            for start, end in ranges.values():
                code = self._store.register_buffer(start, end - start)
                if code:
                    raise OSError(f"error {code} while {end - start} bytes of memory were registered")
                done.append(start)
            yield
        finally:
            for start in done:
                self._store.unregister_buffer(start)

    def _started_master(self) -> Started | None:
        """The master, unless somebody's answers there; the settings then name where it is."""
        host, _, port = str(self._settings["master_server_address"]).rpartition(":")
        if port != "0" and is_listening(host, int(port)):
            if self._offload is not None:
                raise ConfigError(
                    f"{SECTION}.master_server_address: one answers at {host}:{port}, which may drop rows that are not"
                    " on the disk yet; with offload expected a free address, or port 0"
                )
            return None
        number = int(port) or free_port(host)
        self._settings["master_server_address"] = f"{host}:{number}"
        program = shutil.which("mooncake_master", path=f"{os.path.dirname(sys.executable)}{os.pathsep}{os.defpath}")
        if program is None:
            raise ConfigError(f"{SECTION}: mooncake_master is not installed on this host")
        command = [
            program, f"--rpc_port={number}", f"--metrics_port={free_port(host)}", "--enable_metric_reporting=false",
            *(self._offload.master_arguments() if self._offload else ["--eviction_high_watermark_ratio=1.0"]),
        ]  # fmt: skip
        return Started(command, lambda: is_listening(host, number), START_S)


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "metadata_server": PEER_TO_PEER, "master_server_address": "localhost:50051", "local_hostname": "",
        "protocol": "tcp", "global_segment_size": 4 << 30, "device_name": "", "auto_init": True, **settings,
    }  # fmt: skip
    _, _, port = str(found["master_server_address"]).rpartition(":")
    if not port.isdecimal():
        raise ConfigError(
            f"{SECTION}.master_server_address: expected HOST:PORT, got {found['master_server_address']!r}"
        )
    if found.get("use_gdr"):
        raise ConfigError(f"{SECTION}.use_gdr: tensors of a GPU are copied to the host first; expected false")
    if found.get("hard_pin") is False:
        raise ConfigError(f"{SECTION}.hard_pin: rows that are not pinned may be evicted; expected true or null")
    return found


def _offload_of(settings: Mapping[str, Any], serves: bool) -> OffloadSettings | None:
    """None where it is not enabled. Raises `ConfigError` where rows could be lost by it."""
    found = offload_settings(settings.get("offload"))
    if found is None or not serves:
        return found
    if not settings["auto_init"]:
        raise ConfigError(
            f"{SECTION}.auto_init: with offload expected true: a master that somebody else started may drop rows that"
            " are not on the disk yet"
        )
    if settings.get("hard_pin"):
        raise ConfigError(f"{SECTION}.hard_pin: what is pinned is not moved to the disk; with offload expected null")
    return found


def _metadata(settings: Mapping[str, Any]) -> str:
    """How the hosts meet: among themselves, or through the server that whoever runs the master has set up."""
    where = str(settings["metadata_server"])
    if settings["auto_init"] or where.upper() == PEER_TO_PEER:
        return PEER_TO_PEER
    if "://" not in where:
        where = f"http://{where}"
    return where if where.startswith("etcd://") or where.endswith("/metadata") else f"{where}/metadata"


def _first(nested: Any) -> int:
    while isinstance(nested, list):
        nested = nested[0] if nested else MISSING
    return int(nested)
