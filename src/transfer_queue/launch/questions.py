"""What programs written for TransferQueue ask the actor of a service, by its names. `actors` mixes it in.

The actor's server has the answers: they come over a client in the actor's process, which loads torch for the first of
them. All of them return within the client's timeout.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from transfer_queue.errors import NotSupported
from transfer_queue.wire.address import parse_address
from transfer_queue.wire.server_info import REQUESTS, ZMQServerInfo

if TYPE_CHECKING:
    from transfer_queue.client.client import TransferQueueClient
    from transfer_queue.client.operations.partitions import PartitionSnapshot
    from transfer_queue.server.settings import ServerConfig

T = TypeVar("T")


class ActorPlace(NamedTuple):
    """A server as processes of its node and of others reach it; the token travels over Ray only."""

    unix: str
    tcp: str
    token: str


class Questions:
    """Methods of the actor `TransferQueueController` beside those that this package itself calls."""

    _config: ServerConfig
    _stored: Any = None
    _asking: TransferQueueClient | None = None
    _attaching = threading.Lock()

    async def here(self) -> ActorPlace:
        """Where the service is."""
        raise NotImplementedError

    async def get_config(self) -> Any:
        """The merged configuration of the service, or what `store_config` was given.

        It has no `address`: each process of the cluster finds the service by itself. The sampler is a spec.
        """
        if self._stored is not None:
            return self._stored
        await self.here()
        config = await asyncio.to_thread(self._configuration)
        config.controller.zmq_info = await self.get_zmq_server_info()
        if self._config.metrics_port is not None:  # else the question alone would load torch here
            config.metrics.endpoint = await self._asked(lambda client: client.session.config["metrics_endpoint"])
        return config

    def _configuration(self) -> Any:
        from omegaconf import OmegaConf

        config = OmegaConf.load(Path(__file__).parent.parent / "config.yaml")
        config._set_flag("allow_objects", True)
        for name, value in self._config.client["settings"].items():
            OmegaConf.update(config, name, value, merge=False, force_add=True)
        config.server.notice_after_s = list(self._config.notice_after_s)
        return config

    async def store_config(self, conf: Any) -> None:
        """Let `get_config` return `conf` from now on; the service keeps its settings."""
        self._stored = conf

    async def get_zmq_server_info(self) -> ZMQServerInfo:
        """Where the service is, without its token; see `process_zmq_server_info`."""
        place = await self.here()
        tcp = parse_address(place.tcp, place.token)
        return ZMQServerInfo(
            "TransferQueueController",
            f"TransferQueueController_{place.unix}",
            tcp.host,
            {REQUESTS: tcp.port},
            place.unix,
        )

    async def list_partitions(self) -> list[str]:
        """The names of all partitions."""
        return await self._asked(lambda client: client.get_partition_list())

    async def get_partition_snapshot(self, partition_id: str) -> PartitionSnapshot | None:
        """A copy of what is known of a partition, None for an unknown one; see `client.partition.PartitionSnapshot`."""
        from transfer_queue.client.drivers import run
        from transfer_queue.client.operations.partitions import partition_snapshot

        return await self._asked(lambda client: run(client.session, partition_snapshot(client.session, partition_id)))

    async def clear_partition(self, partition_id: str, clear_consumption: bool = True) -> None:
        """Remove a partition with its rows, and what tasks consumed of them: that goes either way. An unknown one is
        fine."""
        await self._asked(lambda client: client.clear_partition(partition_id))

    async def reset_consumption(self, partition_id: str, task_name: str | None = None) -> None:
        """Offer every row again to one task, or to all; an unknown partition is fine."""
        await self._asked(lambda client: client.reset_consumption(partition_id, task_name))

    async def start_metrics(self, port: int = 0) -> str:
        """host:port of the metrics. They are there from the start or not at all: raises `NotSupported` then."""
        endpoint = await self._asked(lambda client: client.session.config["metrics_endpoint"])
        if endpoint is None:
            raise NotSupported("metrics are switched on when the service starts: init with metrics.enabled and .port")
        return str(endpoint)

    async def register_storage_units_for_metrics(self, storage_unit_infos: Any) -> None:
        """Does nothing: every unit serves its own metrics, at an endpoint of its own."""

    async def register_sampler(self, sampler: Any = None) -> None:
        """Raises `NotSupported`: the sampler is chosen when the service starts."""
        raise NotSupported("the sampler is chosen when the service starts: init with controller.sampler")

    async def _asked(self, question: Callable[[TransferQueueClient], T]) -> T:
        """The answer to a question, in a thread: the actor goes on answering others. Raises as the client does."""
        place = await self.here()

        def ask() -> T:
            from transfer_queue.client.client import TransferQueueClient
            from transfer_queue.client.session import Session

            with self._attaching:
                if self._asking is None:
                    self._asking = TransferQueueClient.of(Session(parse_address(place.unix)))
            return question(self._asking)

        return await asyncio.to_thread(ask)
