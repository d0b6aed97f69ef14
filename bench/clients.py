"""Clients of a thread of its own in one process, each as independent as another process would be."""

from __future__ import annotations

import itertools
import os
from typing import Any, Protocol

from bench.session import Session

_numbers = itertools.count()


class Client(Protocol):
    """One row of a few fields at a time."""

    def put(self, key: str, partition: str, fields: dict[str, Any]) -> None: ...

    def get(self, key: str, partition: str) -> Any: ...

    def names(self, partition: str) -> dict[str, Any]:
        """Keys of a partition and their tags."""

    def clear(self, keys: list[str], partition: str) -> None: ...

    def close(self) -> None: ...


class OwnSession:
    """Ours: a session with connections, mappings and pins of its own, under the same operations as the functions."""

    def __init__(self, tq: Any) -> None:
        shared = tq.get_client()
        self._client = type(shared).of(type(shared.session)(shared.session.address))

    def _run(self, function: Any, *arguments: Any) -> Any:
        from transfer_queue.client.drivers import run

        return run(self._client.session, function(self._client.session, *arguments))

    def put(self, key: str, partition: str, fields: dict[str, Any]) -> None:
        from transfer_queue.client.operations import kv

        self._run(kv.kv_put, key, partition, fields)

    def get(self, key: str, partition: str) -> Any:
        from transfer_queue.client.operations import kv

        return self._run(kv.kv_batch_get, key, partition)

    def names(self, partition: str) -> dict[str, Any]:
        from transfer_queue.client.operations import kv

        found: dict[str, Any] = self._run(kv.kv_list, partition)[partition]
        return found

    def clear(self, keys: list[str], partition: str) -> None:
        from transfer_queue.client.operations import kv

        self._run(kv.kv_clear, keys, partition)

    def close(self) -> None:
        self._client.close()


class ReleasedClient:
    """TransferQueue 0.1.11: a client of its own, doing what its functions do with the client of the process."""

    def __init__(self, tq: Any, config: Any) -> None:
        backend = config.backend.storage_backend
        name = f"bench-{os.getpid()}-{next(_numbers)}"
        self._client = tq.TransferQueueClient(name, config.controller.zmq_info, zmq_io_threads=1)
        self._client.initialize_storage_manager(manager_type=backend, config=config.backend[backend])

    def _rows(self, keys: list[str], partition: str, create: bool = False) -> Any:
        return self._client.kv_retrieve_meta(keys=keys, partition_id=partition, create=create)

    def put(self, key: str, partition: str, fields: dict[str, Any]) -> None:
        from tensordict import TensorDict

        batch = TensorDict({name: value.unsqueeze(0) for name, value in fields.items()}, batch_size=1)
        self._client.put(batch, self._rows([key], partition, create=True))

    def get(self, key: str, partition: str) -> Any:
        return self._client.get_data(self._rows([key], partition))

    def names(self, partition: str) -> dict[str, Any]:
        found: dict[str, Any] = self._client.kv_list(partition)[partition]
        return found

    def clear(self, keys: list[str], partition: str) -> None:
        self._client.clear_samples(self._rows(keys, partition))

    def close(self) -> None:
        self._client.close()


def new_client(session: Session) -> Client:
    """One more client of the system that this process has joined."""
    if session.name == "tq":
        return ReleasedClient(session.tq, session.system.config)  # type: ignore[attr-defined]
    return OwnSession(session.tq)
