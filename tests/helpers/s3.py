"""An object store on this machine: rclone's server of the S3 protocol over a directory."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import until

KEY, SECRET = "key-of-a-test", "secret-of-a-test"


@contextlib.contextmanager
def object_store(directory: Path) -> Iterator[dict[str, Any]]:
    """The options with which `s3://bucket/...` leads there."""
    (directory / "bucket").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "rclone"), "serve", "s3", "--config", "", "--vfs-cache-mode", "off"]
    process = subprocess.Popen(
        [*command, "--auth-key", f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{port}", str(directory)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: _answers(port), "the start of the object store")
        # The server gives the checksum of all of a file with a part of it, too, which botocore compares.
        lenient = {"response_checksum_validation": "when_required"}
        yield {"endpoint_url": f"http://127.0.0.1:{port}", "key": KEY, "secret": SECRET, "config_kwargs": lenient}
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
