"""The control surface over HTTP: vLLM's paths, bodies and answers.

server     `control_app`, to mount into the inference server's
serving    `serve`, a server of its own
client     `WeightSyncClient` drives such servers and real vLLM ones; needs nothing but the standard library
peer       one call of such a client
bodies     what requests and answers consist of
extra      what to install where the extra `http` is missing

Refusals are vLLM's `{"error": {"message", "type", "param", "code"}}` with `reason`, the code of a typed error.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_queue.weights.http.client import WeightSyncClient as WeightSyncClient
    from transfer_queue.weights.http.server import control_app as control_app
    from transfer_queue.weights.http.serving import HttpServer as HttpServer
    from transfer_queue.weights.http.serving import serve as serve

_HOME_OF = {"WeightSyncClient": "client", "control_app": "server", "HttpServer": "serving", "serve": "serving"}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'transfer_queue.weights.http' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"transfer_queue.weights.http.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
