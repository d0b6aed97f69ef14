"""Shards of a trainer's ranks, straight into the workers of a real vLLM: each fetches what its loader takes."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_tests.models import answer, drawn, save
from vllm_tests.ranks import WORLD
from vllm_tests.servers import ROOT, Server


@contextlib.contextmanager
def ranks(server: Server, tied: bool, factory: bool) -> Any:
    """Sends the weights of a seed through all ranks; their reports."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "vllm_tests.ranks"]
        started = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(WORLD)]
        for one in started:
            stack.callback(one.kill)

        def tell(rank: int, text: str) -> None:
            started[rank].stdin.write(text + "\n")
            started[rank].stdin.flush()

        def send(seed: int) -> list[dict[str, Any]]:
            for rank in range(WORLD):
                tell(rank, str(seed))
            return [json.loads(one.stdout.readline()) for one in started]

        given = {"port": port, "url": server.url, "token": server.token, "tied": tied, "factory": factory}
        for rank in range(WORLD):
            tell(rank, json.dumps({**given, "rank": rank}))
        assert [one.stdout.readline() for one in started] == ["ready\n"] * WORLD
        yield send
        for one in started:
            one.stdin.close()
            one.wait(30)


@pytest.mark.parametrize(
    ("tied", "factory"), [(False, False), (True, False), (True, True)], ids=["shards", "tied", "vllm's factory"]
)
def test_tensor_parallel_workers_fetch_each_byte_once(
    start: Callable[..., Server], tmp_path: Path, tied: bool, factory: bool
) -> None:
    """`factory`: what the ranks give is gathered by vLLM's own source, and dealt to them."""
    model = drawn(0, tied)
    server = start(save(model, tmp_path), "tq_tcp", 2).wait()
    model_nbytes = sum(tensor.nbytes for tensor in dict(model.named_parameters()).values())
    replicated = sum(one.nbytes for name, one in model.named_parameters() if "norm" in name)
    with ranks(server, tied, factory) as send:
        before = 0
        for version, seed in enumerate([31, 32, 33], 1):
            reports = send(seed)
            assert [one["version"] for one in reports] == [version] * WORLD
            served = sum(one["served"] for one in reports)
            assert all(one["served"] for one in reports)
            assert model_nbytes <= served - before <= 1.05 * (model_nbytes + replicated)
            before = served
            assert server.say() == answer(drawn(seed, tied))
            assert server.client().get_weight_version() == str(version)
    server.stop()
