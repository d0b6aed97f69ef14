"""Clients beside that of this process: an object of its own here, and another process.

`python other_clients.py [ray-address]` is that process. It attaches by `init`, then makes the calls it reads from its
standard input, `(on, name, arguments)` pickled, and writes back what each returned or raised.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from typing import Any

import transfer_queue as tq


class OtherClients:
    """They are made when they are first called. `config` is what `init` returned, `cluster` the address of Ray."""

    def __init__(self, config: Any, cluster: str) -> None:
        self._config = config
        self._cluster = cluster
        self._object: Any = None
        self._process: subprocess.Popen[bytes] | None = None

    def object(self) -> Any:
        """A client as programs construct it."""
        if self._object is None:
            backend = self._config.backend.storage_backend
            self._object = tq.TransferQueueClient("another", self._config.controller.zmq_info)
            self._object.initialize_storage_manager(manager_type=backend, config=self._config.backend[backend])
        return self._object

    def in_process(self, on: str, name: str, given: dict[str, Any]) -> Any:
        """What a call there returns; what it raised is raised here."""
        if self._process is None:
            self._process = self._started()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((on, name, given), self._process.stdin)
        self._process.stdin.flush()
        ok, result = pickle.load(self._process.stdout)
        if ok:
            return result
        raise result

    def close(self) -> None:
        if self._object is not None:
            self._object.close()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(60)

    def _started(self) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        if not self._cluster:
            environment["TQ_ADDRESS"] = tq.address()
        command = [sys.executable, "-W", "ignore", __file__, *([self._cluster] if self._cluster else [])]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def main(cluster: str | None) -> None:
    """Answer until the input ends. Whatever else prints to standard output goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if cluster is not None:
        import ray

        ray.init(cluster, log_to_driver=False)
    tq.init()
    while True:
        try:
            on, name, given = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            returned = getattr(tq if on == "tq" else tq.get_client(), name)(**given)
            answer = True, asyncio.run(returned) if asyncio.iscoroutine(returned) else returned
        except Exception as raised:  # noqa: BLE001  what is raised is raised there
            answer = False, raised
        answers.write(pickle.dumps(answer))
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
