"""The systems under test behind one small protocol; ours and TransferQueue 0.1.11 share nearly everything."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench import digest
from bench.payloads import Columns, Dense, Objects, Ragged

ROOT = Path(__file__).resolve().parent.parent


class System(Protocol):
    """What a writer or reader process can do with a system. Only `put` and `get` are timed."""

    def serve(self, options: dict[str, Any]) -> dict[str, Any]:
        """Start the system, in the writer; return what `attach` needs in the reader."""

    def attach(self, connection: dict[str, Any]) -> None:
        """Join the system that the writer started."""

    def close(self) -> None:
        """Leave; whoever served also ends what it started."""

    def batch(self, columns: Columns) -> Any:
        """The batch in the form that users of this system hold it in."""

    def put(self, partition: str, keys: list[str], batch: Any) -> None: ...

    def publish(self, partition: str) -> None:
        """Untimed: let the reader find what was put, for systems without names of their own."""

    def locate(self, partition: str) -> None:
        """Untimed counterpart of `publish` in the reader."""

    def get(self, partition: str, keys: list[str], positions: Sequence[int] | None, copy: bool) -> Any:
        """Every field of these rows; `positions` are the keys' rows in the batch, None for all in order."""

    def leave(self, partition: str) -> None:
        """Untimed: undo `locate` once the result was dropped."""

    def sums(self, result: Any) -> dict[str, Any]:
        """Digest by field of what `get` returned."""

    def clear(self, partition: str, keys: list[str]) -> None: ...


class TransferQueueApi:
    """What both implementations of the API have in common."""

    def __init__(self) -> None:
        import transfer_queue

        self.tq: Any = transfer_queue
        self.config: Any = None
        """What the system was started with, for its datasets."""
        self._serving = False

    def _started(self, config: Any) -> str:
        """Keep the merged configuration; the text that `_joined` takes in another process."""
        self.config = config
        return base64.b64encode(pickle.dumps(config)).decode()

    def _joined(self, connection: dict[str, Any]) -> None:
        self.config = pickle.loads(base64.b64decode(connection["config"]))

    def _check_origin(self, from_repository: bool) -> None:
        """Raise ImportError when this interpreter found the other implementation."""
        origin = Path(self.tq.__file__).resolve()
        if origin.is_relative_to(ROOT / "src" / "transfer_queue") != from_repository:
            raise ImportError(f"the wrong transfer_queue was imported: {origin}")

    def batch(self, columns: Columns) -> Any:
        from tensordict import TensorDict

        size = len(next(iter(columns.values())).rows)
        return TensorDict({name: torch_column(column) for name, column in columns.items()}, batch_size=size)

    def put(self, partition: str, keys: list[str], batch: Any) -> None:
        self.tq.kv_batch_put(keys=keys, partition_id=partition, fields=batch)

    def publish(self, partition: str) -> None:
        """Keys are names."""

    def locate(self, partition: str) -> None:
        """Keys are names."""

    def leave(self, partition: str) -> None:
        """Keys are names."""

    def sums(self, result: Any) -> dict[str, Any]:
        return {name: column_sums(result[name]) for name in result.keys()}  # noqa: SIM118 - a TensorDict's rows iterate

    def clear(self, partition: str, keys: list[str]) -> None:
        self.tq.kv_clear(keys=keys, partition_id=partition)


class Ours(TransferQueueApi):
    """The package of this repository, on its local server."""

    def serve(self, options: dict[str, Any]) -> dict[str, Any]:
        from omegaconf import OmegaConf

        self._check_origin(from_repository=True)
        config = self._started(self.tq.init(OmegaConf.create(options["config"])))
        stats = self.tq.get_client().stats()
        address = os.environ["TQ_ADDRESS"]
        return {"address": address, "tcp": stats.get("tcp", ""), "server_pid": stats["pid"], "config": config}

    def attach(self, connection: dict[str, Any]) -> None:
        os.environ["TQ_ADDRESS"] = connection["address"]
        self._joined(connection)
        self.tq.init()

    def get(self, partition: str, keys: list[str], positions: Sequence[int] | None, copy: bool) -> Any:
        del positions
        if copy:
            return self.tq.kv_batch_get(keys=keys, partition_id=partition, copy=True)
        return self.tq.kv_batch_get(keys=keys, partition_id=partition)

    def close(self) -> None:
        self.tq.close()


class Released(TransferQueueApi):
    """TransferQueue 0.1.11 from the package index, in a Ray cluster that the driver started. Every get copies."""

    def serve(self, options: dict[str, Any]) -> dict[str, Any]:
        from omegaconf import OmegaConf

        self._check_origin(from_repository=False)
        cluster = options["cluster"]
        join_cluster(cluster)
        origin = workers_transfer_queue()
        if origin != self.tq.__file__:
            raise ImportError(f"the cluster's workers import another transfer_queue: {origin}")
        config = self._started(self.tq.init(OmegaConf.create(options["config"])))
        self._serving = True
        return {"cluster": cluster, "config": config}

    def attach(self, connection: dict[str, Any]) -> None:
        self._check_origin(from_repository=False)
        join_cluster(connection["cluster"])
        self._joined(connection)
        self.tq.init()

    def get(self, partition: str, keys: list[str], positions: Sequence[int] | None, copy: bool) -> Any:
        del positions, copy
        return self.tq.kv_batch_get(keys=keys, partition_id=partition)

    def close(self) -> None:
        """The writer ends the system. A reader must not call tq.close(): it would end the controller for everybody."""
        import ray

        if self._serving:
            with contextlib.suppress(RuntimeError):
                self.tq.close()
        ray.shutdown()


def join_cluster(address: str) -> None:
    """Connect this process to the Ray cluster at `address`."""
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")


def workers_transfer_queue() -> str:
    """Where a worker process of the cluster finds `transfer_queue`."""
    import ray

    @ray.remote(num_cpus=0)
    def origin() -> str:
        import transfer_queue

        return str(transfer_queue.__file__)

    return str(ray.get(origin.remote(), timeout=60))


def torch_column(column: Dense | Ragged | Objects) -> Any:
    """A column as a TensorDict holds it: tensor, jagged tensor or NonTensorStack."""
    import torch
    from tensordict import NonTensorData, NonTensorStack

    if isinstance(column, Dense):
        return torch.from_numpy(column.rows)
    if isinstance(column, Ragged):
        return torch.nested.as_nested_tensor([torch.from_numpy(row) for row in column.rows], layout=torch.jagged)
    return NonTensorStack(*[NonTensorData(torch_value(row)) for row in column.rows])


def torch_value(value: Any) -> Any:
    """A row value with its arrays as tensors of the same memory."""
    import numpy as np
    import torch

    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: torch_value(item) for key, item in value.items()}
    return value


def column_sums(column: Any) -> digest.Sums:
    """Digest of one returned column of any kind; jagged columns without holes are summed in place."""
    import torch

    if not isinstance(column, torch.Tensor):
        return digest.of_column(rows_of(column))
    if not column.is_nested:
        return digest.of_column(column.numpy())
    jagged: Any = column
    if jagged.layout is torch.jagged and jagged.lengths() is None:
        offsets = jagged.offsets().numpy()
        if int(offsets[0]) == 0 and int(offsets[-1]) == len(jagged.values()):
            return digest.of_packed(jagged.values().detach().numpy(), offsets)
    return digest.of_column(list(column.unbind()))


def rows_of(column: Any) -> Iterable[Any]:
    """Python values of a non-tensor column; a TensorDict hands it out as a stack or as a list-like of it."""
    from tensordict import NonTensorData

    rows = column.tolist() if hasattr(column, "tolist") else list(column)
    return [row.data if isinstance(row, NonTensorData) else row for row in rows]
