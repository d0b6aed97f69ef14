"""The calls that bring new weights, from the trainer to workers of its host: JSON over a socket, nothing is pickled.

An inference server would offer `transfer_queue.weights.http` instead, and the trainer use its `WeightSyncClient`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

from transfer_queue.errors import InternalError, ServiceUnavailable, TransferQueueError, error_from_code

_CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
_CLOSE_S = 1.0


class Answering(Protocol):
    """What takes the four calls."""

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> object: ...
    def start_weight_update(self) -> object: ...
    def update_weights(self, update_info: Mapping[str, Any]) -> object: ...
    def finish_weight_update(self, weight_version: str | None = None) -> object: ...


class Line:
    """A worker's end: a thread that carries out the calls of one trainer after the other."""

    def __init__(self, target: Answering, token: str) -> None:
        self._listener = Listener(family="AF_UNIX", authkey=token.encode())
        self._target = target
        self.address = str(self._listener.address)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="demo-line", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no further trainer. One that is connected still keeps the thread until it leaves."""
        self._closed = True
        with suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
            knock.connect(self.address)
        self._thread.join(_CLOSE_S)
        self._listener.close()

    def _run(self) -> None:
        while not self._closed:
            # Strangers and trainers that die are of no account.
            with suppress(OSError, EOFError, AuthenticationError), self._listener.accept() as trainer:
                while True:
                    trainer.send_bytes(json.dumps(self._answer(trainer.recv_bytes())).encode())

    def _answer(self, data: bytes) -> dict[str, str]:
        name, arguments = json.loads(data)
        try:
            if name not in _CALLS:
                raise InternalError(f"no call {name!r}")
            getattr(self._target, name)(*arguments)
        except TransferQueueError as error:
            return {"code": error.code, "text": str(error)}
        except Exception as error:  # noqa: BLE001 the trainer has to hear of it
            return {"code": InternalError.code, "text": repr(error)}
        return {}


class Lines:
    """The trainer's end: each call goes to all workers at the same time; the first error is raised once all answered.

    A worker that does not answer within `timeout_s` raises `ServiceUnavailable`.
    """

    def __init__(self, addresses: Sequence[str], token: str, timeout_s: float) -> None:
        self._workers = [Client(address, authkey=token.encode()) for address in addresses]
        self._timeout_s = timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _call(self, name: str, *arguments: Any) -> None:
        for worker in self._workers:
            worker.send_bytes(json.dumps([name, arguments]).encode())
        answers = [self._receive(worker) for worker in self._workers]
        for answer in answers:
            if answer:
                raise error_from_code(answer["code"], answer["text"])

    def _receive(self, worker: Connection[Any, Any]) -> dict[str, str]:
        if not worker.poll(self._timeout_s):
            raise ServiceUnavailable(f"a rollout worker did not answer within {self._timeout_s} s")
        found: dict[str, str] = json.loads(worker.recv_bytes())
        return found
