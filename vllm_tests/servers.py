"""vLLM servers as child processes on loopback, stopped by their pids."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from transfer_queue.weights.http import WeightSyncClient
from vllm_tests.models import NUM_TOKENS, PROMPT

ROOT = Path(__file__).resolve().parent.parent
PATHS = os.pathsep.join(map(str, (ROOT / "src", ROOT)))  # of this tree, whichever is installed
TOKEN = secrets.token_hex(16)  # of all servers of a run, so that one client may have several
START_S = 240.0
STOP_S = 30.0


class Server:
    """One server. `url` and `token` are known at once; `wait` until it serves."""

    def __init__(self, model: Path, backend: str, log: Path, tp: int = 1, *options: str) -> None:
        self.token = TOKEN
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.began = time.monotonic()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(self.port),
            "--api-key", self.token, "--model", str(model), "--served-model-name", "tiny", "--dtype", "float32",
            "--enforce-eager", "--max-model-len", "4096", "--tensor-parallel-size", str(tp),
            "--weight-transfer-config", json.dumps({"backend": backend}),
            "--worker-extension-cls", "vllm_tests.faults.Faults", *options,
        ]  # fmt: skip
        more = {
            "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": PATHS,
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp))), "VLLM_NO_USAGE_STATS": "1",
            "TQ_WEIGHTS_ROOT": tempfile.gettempdir(),
        }  # fmt: skip
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **more}, cwd=log.parent
            )

    def wait(self) -> Server:
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
        """The server and the processes it started, by pid; and the shared memory that vLLM leaves behind."""
        shared: set[Path] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*psutil.Process(self._process.pid).children(recursive=True)]
            shared = {path for process in family for path in _shared_files(process.pid)}
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

    def client(self, timeout_s: float = 60.0) -> WeightSyncClient:
        return WeightSyncClient(self.url, self.token, timeout_s=timeout_s)

    def health(self) -> int:
        """The status of /health; 0 when nobody listens."""
        try:
            return self.ask("GET", "/health")[0]
        except OSError:
            return 0

    def say(self, num_tokens: int = NUM_TOKENS, prompt: list[int] | None = None) -> list[int]:
        """The greedy continuation."""
        status, found = self.complete(num_tokens, prompt)
        assert status == 200, (status, found)
        return list(found["choices"][0]["token_ids"])

    def complete(self, num_tokens: int, prompt: list[int] | None = None, request_id: str = "") -> tuple[int, Any]:
        body = {
            "model": "tiny", "prompt": prompt or PROMPT, "max_tokens": num_tokens, "temperature": 0.0,
            "ignore_eos": True, "return_token_ids": True, **({"request_id": request_id} if request_id else {}),
        }  # fmt: skip
        return self.ask("POST", "/v1/completions", body)

    def break_loader(self, num_times: int, rank: int = -1) -> None:
        """Have the next loads fail in the middle, in one worker or (-1) in all."""
        status, found = self.ask(
            "POST", "/collective_rpc", {"method": "break_loader", "args": [num_times, rank], "timeout": 20}
        )
        assert status == 200, found

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


def _shared_files(pid: int) -> set[Path]:
    """What vLLM's workers of one server share."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {
        Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/vllm_dist_" in line and "deleted" not in line
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
