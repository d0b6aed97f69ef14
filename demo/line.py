"""The calls that bring new weights, from the trainer to a worker of its host: JSON over a socket, nothing is pickled.

An inference server would offer `transfer_queue.weights.http` instead, and the trainer use its `WeightSyncClient`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from transfer_queue.errors import InternalError, ServiceUnavailable, TransferQueueError, error_from_code
from transfer_queue.weights.receive.gate import Mode
from transfer_queue.weights.receive.status import ServerStatus, decode, encode

_CALLS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "abort_weight_update",
    "get_weight_version",
    "pause_generation",
    "resume_generation",
)
_CLOSE_S = 1.0


class Line:
    """A worker's end: a thread that carries out the calls of one trainer after the other.

    `target` has the methods of `Control`.
    """

    def __init__(self, target: Any, token: str) -> None:
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

    def _answer(self, data: bytes) -> dict[str, Any]:
        name, arguments = json.loads(data)
        try:
            if name == "status":
                return {"value": encode(self._target.status())}
            if name not in _CALLS:
                raise InternalError(f"no call {name!r}")
            return {"value": getattr(self._target, name)(*arguments)}
        except TransferQueueError as error:
            return {"code": error.code, "text": str(error)}
        except Exception as error:  # noqa: BLE001 the trainer has to hear of it
            return {"code": InternalError.code, "text": repr(error)}


class Caller:
    """The trainer's end of one worker's line: a member of a `Fleet`. Connects with the first call.

    A worker that is gone, or does not answer within `timeout_s`, raises `ServiceUnavailable`; one that knows another
    token `AuthenticationError`.
    """

    def __init__(self, address: str, token: str, timeout_s: float) -> None:
        self.address = address
        self._token = token.encode()
        self._timeout_s = timeout_s
        self._turn = threading.Lock()
        self._worker: Connection[Any, Any] | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)

    def abort_weight_update(self) -> bool:
        return bool(self._call("abort_weight_update"))

    def get_weight_version(self) -> str:
        return str(self._call("get_weight_version"))

    def status(self) -> ServerStatus:
        return decode(self._call("status"))

    def pause_generation(
        self, mode: Mode = "abort", clear_cache: bool = True, owner: str = "", lease_s: float | None = None
    ) -> None:
        self._call("pause_generation", mode, clear_cache, owner, lease_s)

    def resume_generation(self, owner: str | None = None) -> None:
        self._call("resume_generation", owner)

    def close(self) -> None:
        """Hang up. Repeatable; another call would connect again."""
        with self._turn:
            self._hang_up()

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._turn:
            try:
                answer = self._ask(json.dumps([name, arguments]).encode())
            except (OSError, EOFError) as error:
                self._hang_up()
                if isinstance(error, TransferQueueError):
                    raise
                raise ServiceUnavailable(f"the worker at {self.address} is gone: {error!r}") from None
        if "code" in answer:
            raise error_from_code(answer["code"], answer["text"])
        return answer["value"]

    def _ask(self, request: bytes) -> Mapping[str, Any]:
        if self._worker is None:
            self._worker = Client(self.address, authkey=self._token)
        self._worker.send_bytes(request)
        if not self._worker.poll(self._timeout_s):
            raise ServiceUnavailable(f"the worker at {self.address} did not answer within {self._timeout_s} s")
        found: dict[str, Any] = json.loads(self._worker.recv_bytes())
        return found

    def _hang_up(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
