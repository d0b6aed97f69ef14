"""For the drivers and workers of test_ray.py, which run in processes of their own."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

import transfer_queue as tq
from transfer_queue.errors import ConfigError, NotInitialized, ServiceUnavailable

__all__ = [
    "ConfigError", "NotInitialized", "OnNode", "ServiceUnavailable", "Worker", "controller", "do", "ended", "os",
    "pickle", "psutil", "ray", "said", "server", "signal", "subprocess", "sys", "time", "torch", "tq", "wait_for",
]  # fmt: skip


def said(error: Any, call: Callable[[], Any], within_s: float = 20.0) -> str:
    """The message `call` raises `error` with, promptly (asking Ray takes seconds on a busy machine)."""
    started = time.monotonic()
    try:
        call()
    except error as found:
        assert time.monotonic() - started < within_s, time.monotonic() - started
        return str(found)
    raise AssertionError("nothing was raised")


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def server() -> int:
    """The process this one is attached to."""
    return int(tq.get_client().stats()["pid"])


def controller() -> Any:
    return ray.get_actor("TransferQueueController", namespace="transfer_queue")


@ray.remote(num_cpus=0)
class Worker:
    """A process of the cluster that runs some code; the answer is what it calls `out`."""

    def do(self, code: str) -> Any:
        import cluster  # Ray pickles this class by value, without the names around it

        scope = dict(vars(cluster))
        exec(code, scope)
        return scope.get("out")


def do(worker: Any, code: str) -> Any:
    return ray.get(worker.do.remote(code), timeout=100)
