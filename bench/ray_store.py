"""Ray's object store behind the same protocol: a batch is one object of numpy columns, read as a zero-copy view."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench import digest
from bench.payloads import Columns
from bench.systems import join_cluster

OBJECT_STORE_NBYTES = 5 << 30
NAMESPACE = "transfer-queue-bench"


class RayHead:
    """Starts the one Ray cluster that both peers use and holds it for the length of the run."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="tqb-")

    def serve(self, options: dict[str, Any]) -> dict[str, Any]:
        import ray

        context = ray.init(
            address="local",
            num_cpus=options["num_cpus"],
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_NBYTES,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=self._directory,
            _node_ip_address="127.0.0.1",
        )
        return {"cluster": context.address_info["address"]}

    def close(self) -> None:
        import ray

        ray.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)


class RayStore:
    """An actor passes references from the writer to the reader, outside of what is timed, and keeps objects alive."""

    def __init__(self) -> None:
        self._refs: dict[str, Any] = {}
        self._board: Any = None

    def serve(self, options: dict[str, Any]) -> dict[str, Any]:
        join_cluster(options["cluster"])
        self._board = new_board()
        return {"cluster": options["cluster"]}

    def attach(self, connection: dict[str, Any]) -> None:
        import ray

        join_cluster(connection["cluster"])
        self._board = ray.get_actor("board", namespace=NAMESPACE)

    def close(self) -> None:
        import ray

        self._refs.clear()
        ray.shutdown()

    def batch(self, columns: Columns) -> Any:
        return {name: column.rows for name, column in columns.items()}

    def put(self, partition: str, keys: list[str], batch: Any) -> None:
        import ray

        del keys
        self._refs[partition] = ray.put(batch)

    def publish(self, partition: str) -> None:
        import ray

        ray.get(self._board.set.remote(partition, [self._refs[partition]]), timeout=30)

    def locate(self, partition: str) -> None:
        import ray

        self._refs[partition] = ray.get(self._board.get.remote(partition), timeout=30)[0]

    def leave(self, partition: str) -> None:
        self._refs.pop(partition, None)

    def get(self, partition: str, keys: list[str], positions: Sequence[int] | None, copy: bool) -> Any:
        import ray

        del keys
        batch = ray.get(self._refs[partition], timeout=60)
        if positions is not None:
            return {name: take(rows, positions) for name, rows in batch.items()}
        if copy:
            return {name: rows.copy() for name, rows in batch.items()}
        return batch

    def sums(self, result: Any) -> dict[str, Any]:
        return {name: digest.of_column(rows) for name, rows in result.items()}

    def clear(self, partition: str, keys: list[str]) -> None:
        import ray

        del keys
        self._refs.pop(partition, None)
        ray.get(self._board.drop.remote(partition), timeout=30)


def take(rows: Any, positions: Sequence[int]) -> Any:
    """These rows of a column, copied."""
    return rows[np.asarray(positions)] if isinstance(rows, np.ndarray) else [rows[i] for i in positions]


def new_board() -> Any:
    """Start the actor that names references. Its class is local so that Ray ships it by value."""
    import ray

    class Board:
        def __init__(self) -> None:
            self.refs: dict[str, Any] = {}

        def set(self, partition: str, refs: list[Any]) -> None:
            self.refs[partition] = refs

        def get(self, partition: str) -> list[Any]:
            refs: list[Any] = self.refs[partition]
            return refs

        def drop(self, partition: str) -> None:
            self.refs.pop(partition, None)

    return ray.remote(num_cpus=0)(Board).options(name="board", namespace=NAMESPACE).remote()
