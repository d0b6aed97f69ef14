"""Inference servers as child processes on loopback, stopped by their pids: what those of vLLM and of SGLang share."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parent.parent
PATHS = os.pathsep.join(map(str, (ROOT / "src", ROOT)))  # of this tree, whichever is installed
TOKEN = secrets.token_hex(16)  # of all servers of a run, so that one client may have several
START_S = 240.0
STOP_S = 30.0


class ServerProcess:
    """One server. `url` and `token` are known at once; `begin` starts it, `wait` until it serves."""

    def __init__(self, log: Path) -> None:
        self.token = TOKEN
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log

    def begin(self, command: list[str], env: dict[str, str]) -> None:
        self.began = time.monotonic()
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **env}, cwd=self.log.parent
            )

    def wait(self) -> Self:
        """Until it answers; raises with the end of its log when it does not."""
        while self.health() != 200:
            late = time.monotonic() - self.began > START_S
            if late or self._process.poll() is not None:
                end = self.log.read_text(errors="replace")[-6000:]
                self.stop()
                raise RuntimeError(f"the server did not come up:\n{end}")
            time.sleep(0.2)
        self.start_s = time.monotonic() - self.began
        return self

    def stop(self) -> None:
        """The server and the processes it started, by pid; and the shared memory that they leave behind."""
        shared: set[Path] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            family = self.family()
            shared = {path for process in family for path in self.shared_files(process.pid)}
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            _, left = psutil.wait_procs(family, STOP_S)  # they remove their shared memory
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.kill()
        self._process.wait()
        for path in shared:
            path.unlink(missing_ok=True)

    def family(self) -> list[psutil.Process]:
        """The processes that it started."""
        return list(psutil.Process(self._process.pid).children(recursive=True))

    def shared_files(self, pid: int) -> set[Path]:
        """What one of them would leave in /dev/shm."""
        return set()

    def health(self) -> int:
        """The status of /health; 0 when nobody listens."""
        try:
            return self.ask("GET", "/health")[0]
        except OSError:
            return 0

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
            link.request(method, path, None if body is None else json.dumps(body), headers)
            answered = link.getresponse()
            text = answered.read()
            return answered.status, json.loads(text) if text.strip().startswith((b"{", b"[")) else text.decode()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            link.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
