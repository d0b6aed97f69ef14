"""`ZMQServerInfo` and `process_zmq_server_info`, for programs that attach a client by hand."""

from __future__ import annotations

from typing import Any

from transfer_queue.wire.server_info import ZMQServerInfo as ZMQServerInfo


def process_zmq_server_info(handlers: Any) -> Any:
    """The `ZMQServerInfo` of a controller's actor handle, or a dict of them for a dict of handles.

    Afterwards clients made in this process with it reach the service, also from another node. Blocks until the actor
    answers; raises what Ray raises when it ended.
    """
    from transfer_queue.launch.ray import server_info_of

    if isinstance(handlers, dict):
        return {name: server_info_of(handler) for name, handler in handlers.items()}
    return server_info_of(handlers)
