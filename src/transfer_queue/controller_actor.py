"""`TransferQueueController` as programs written for TransferQueue import it: a class whose `remote` starts an actor."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from transfer_queue import config as settings
from transfer_queue.errors import NotInitialized
from transfer_queue.launch import in_ray


@dataclass(frozen=True)
class Start:
    """The class with options for Ray, as `TransferQueueController.options` gives it."""

    options: dict[str, Any] = field(default_factory=dict)

    def remote(self, sampler: Any = "SequentialSampler", polling_mode: bool = False) -> Any:
        """See `TransferQueueController.remote`."""
        if not in_ray():
            raise NotInitialized("TransferQueueController is an actor of Ray: call ray.init() first")
        conf = settings.merged({"controller": {"sampler": sampler, "polling_mode": polling_mode}})
        from transfer_queue.launch.ray import new_controller

        return new_controller(
            settings.server_config(conf, "", os.getpid()), {"num_cpus": 0, "max_restarts": 0, **self.options}
        )


class TransferQueueController:
    """A Ray actor with a service of its own. `transfer_queue.init` starts one by itself; nobody has to use this.

    Every method of `launch.actors.TransferQueueController` can be called on the handle. Clients attach with
    `process_zmq_server_info(handle)`; `transfer_queue.init` finds it where its options give it the name
    "TransferQueueController" in the namespace "transfer_queue". The service ends with the actor.
    """

    @staticmethod
    def options(**options: Any) -> Start:
        """The class with these options of a Ray actor; it reserves no CPU unless they say so."""
        return Start(options)

    @staticmethod
    def remote(sampler: Any = "SequentialSampler", polling_mode: bool = False) -> Any:
        """Start an actor with this sampler and mode; returns its handle at once.

        Raises `NotInitialized` without Ray, `ConfigError`, and ValueError where the options name an actor that exists.
        """
        return Start().remote(sampler, polling_mode)
