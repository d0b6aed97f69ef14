"""A service for a whole Ray cluster: found by an actor's name, ended with the process that started it.

Nothing is reserved: the actors need no CPU. Every wait has a deadline and says what it waits for.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from transfer_queue.errors import ServiceUnavailable, TransferQueueError
from transfer_queue.launch.actors import CONTROLLER, NAMESPACE, STOP_TIMEOUT_S, TransferQueueController
from transfer_queue.launch.local import RECOVERY_TIMEOUT_S, START_TIMEOUT_S, start_timeout_s
from transfer_queue.server.settings import ServerConfig
from transfer_queue.wire.address import Address
from transfer_queue.wire.server_info import ZMQServerInfo, remember

INIT_TIMEOUT_S = 60.0
RETRY_INTERVAL_S = 0.05


class RayService:
    """The service this process started: the handle keeps its actor alive, which Ray ends with this process."""

    def __init__(self, controller: Any, addresses: Sequence[Address]) -> None:
        self.addresses = addresses
        self._controller = controller
        self._owner = os.getpid()
        self._membership = _membership()

    def stop(self) -> None:
        """End controller, units and their servers. Once Ray itself was shut down there is nothing left to end."""
        if os.getpid() != self._owner or not ray.is_initialized() or _membership() != self._membership:
            return
        with contextlib.suppress(RayError):
            ray.get(self._controller.stop.remote(), timeout=2 * STOP_TIMEOUT_S)
        with contextlib.suppress(RayError):
            ray.kill(self._controller)


class RayLauncher:
    """Finds or starts the service of the Ray cluster this process is connected to, at most within `INIT_TIMEOUT_S`."""

    has_hosts = True

    def __init__(self, recovers: bool = False) -> None:
        """`recovers`: the service reads a journal first, which takes longer."""
        self._began = time.monotonic()
        self._deadline = self._began + INIT_TIMEOUT_S + (RECOVERY_TIMEOUT_S if recovers else 0.0)
        self._waits_for = ""

    def find(self) -> Sequence[Address]:
        while True:
            try:
                controller = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
            except ValueError:
                return []
            except RayError as error:
                raise ServiceUnavailable(f"the Ray cluster does not answer: {error}") from error
            self._waits_for = f"the server of the actor {CONTROLLER}, which another process created"
            with contextlib.suppress(RayError):  # it ended, or could not start: its name is free in a moment
                return self._addresses(controller)
            self._pause()

    def launch(self, config: ServerConfig) -> RayService | None:
        node = ray.get_runtime_context().get_node_id()
        options = {
            "name": CONTROLLER,
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }  # and the runtime environment of the caller, which Ray hands down where none is given
        self._waits_for = f"Ray to start the actor {CONTROLLER} on this node"
        self._deadline = max(self._deadline, self._began + INIT_TIMEOUT_S - START_TIMEOUT_S + start_timeout_s(config))
        try:
            controller = new_controller(_in_this_cluster(config), options)
        except ValueError:  # the name is taken
            self._pause()
            return None
        try:
            return RayService(controller, self._addresses(controller))
        except (RayError, TransferQueueError) as error:
            ray.kill(controller)
            if isinstance(error, RayTaskError) and isinstance(error.cause, TransferQueueError):
                raise error.cause from None
            if isinstance(error, RayError):
                raise ServiceUnavailable(f"no service could be started in the Ray cluster: {error}") from error
            raise

    def _addresses(self, controller: Any) -> list[Address]:
        """Ask a controller where this process attaches, and wait until it is up."""
        node = ray.get_runtime_context().get_node_id()
        try:
            answer = controller.addresses.remote(node)
        except AttributeError:
            raise ServiceUnavailable(f"the actor {CONTROLLER} in this Ray cluster is another package's") from None
        try:
            found: list[Address] = ray.get(answer, timeout=max(0.0, self._deadline - time.monotonic()))
        except GetTimeoutError:
            raise self._too_late() from None
        return found

    def _pause(self) -> None:
        if time.monotonic() > self._deadline:
            raise self._too_late()
        select.select([], [], [], RETRY_INTERVAL_S)  # the table of names has no event to wait for

    def _too_late(self) -> ServiceUnavailable:
        return ServiceUnavailable(f"waited {self._deadline - self._began:g} s for {self._waits_for}")


def new_controller(config: ServerConfig, options: dict[str, Any]) -> Any:
    """The handle of a new actor with these options; it starts a server. Raises ValueError where its name is taken."""
    return ray.remote(TransferQueueController).options(**options).remote(config)


def _in_this_cluster(config: ServerConfig) -> ServerConfig:
    """With RayStore, unless its cluster was named: this process's."""
    if config.engine != "RayStore" or config.engine_settings.get("address"):
        return config
    here = ray.get_runtime_context().gcs_address
    return msgspec.structs.replace(config, engine_settings={**config.engine_settings, "address": here})


def find_controller() -> Any:
    """The actor of this cluster's service, None where it has none or Ray does not answer."""
    try:
        return ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except (ValueError, RayError):
        return None


def server_info_of(controller: Any) -> ZMQServerInfo:
    """Where the service of an actor is; clients of this process attach with it, also from another node.

    Blocks until the actor is up, at most `INIT_TIMEOUT_S`. Raises `ServiceUnavailable`, and what Ray raises.
    """
    node = ray.get_runtime_context().get_node_id()
    try:
        asked = [controller.get_zmq_server_info.remote(), controller.addresses.remote(node)]
    except AttributeError:
        raise ServiceUnavailable("this actor is no controller of this package") from None
    try:
        info: ZMQServerInfo
        info, addresses = ray.get(asked, timeout=INIT_TIMEOUT_S)
    except GetTimeoutError:
        raise ServiceUnavailable(f"waited {INIT_TIMEOUT_S:g} s for the actor to say where its service is") from None
    remember(info, addresses)
    return info


def _membership() -> tuple[str, str]:
    """Which cluster this process is connected to, and as which job."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()
