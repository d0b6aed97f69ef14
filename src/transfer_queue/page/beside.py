"""A page that is started beside a server and ends with it. Free of torch and starlette: the server calls this."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

from transfer_queue.errors import ConfigError, NotSupported
from transfer_queue.wire.address import is_loopback

LOOPBACK = "127.0.0.1"
BACKLOG = 128
STOP_S = 5.0
NEEDED = ("jinja2", "starlette", "uvicorn")
RECORDING = ("TQ_TRACE", "TQ_OTEL")  # a page asks all the time, and what it asks is no part of the job


def check_installed() -> None:
    """`NotSupported` where the extra `http` is missing. Imports nothing of it."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        text = f"the page needs {', '.join(missing)}, not installed here: pip install 'transfer-queue[http]'"
        raise NotSupported(text)


def listen(host: str, port: int, token: str) -> socket.socket:
    """A socket that listens there (port 0: any free one). `ConfigError` when it cannot, or when others could look
    without a token."""
    if not token and not is_loopback(host):
        raise ConfigError(f"{host} can be reached by others: a page there needs --token-file")
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port: {port} is no port")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"--port: cannot listen on {host}:{port}: {error}") from error


def url_of(listener: socket.socket) -> str:
    """Where a browser on this host finds it."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else LOOPBACK
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


@contextlib.contextmanager
def beside(address: str, port: int) -> Iterator[int]:
    """A page on loopback that shows the service at `address`, which need not be there yet. Yields a descriptor: the
    page lives as long as anybody has it open, at most as long as the block. Raises as `check_installed` and `listen`.
    """
    check_installed()
    ends, life = os.pipe()
    with listen(LOOPBACK, port, "") as listener:
        command = [sys.executable, "-m", "transfer_queue.page", address, str(listener.fileno())]
        path = os.pathsep.join(one for one in sys.path if one)
        unrecorded = {name: value for name, value in os.environ.items() if name not in RECORDING}
        process = subprocess.Popen(
            command, stdin=ends, pass_fds=(listener.fileno(),), env={**unrecorded, "PYTHONPATH": path},
            start_new_session=True,
        )  # fmt: skip
        print(f"page: {url_of(listener)}", file=sys.stderr, flush=True)
    os.close(ends)
    try:
        yield life
    finally:
        os.close(life)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        if process.returncode is None:
            process.kill()
            process.wait()
