"""An engine whose updates carry the buckets themselves, and a child process that serves a tiny model under control.

The weights of version n are all n, so a forward pass shows which versions it saw.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from weights import ROOM_S, Version, full

from transfer_queue.errors import Aborted, InvalidInput, TransferQueueError
from transfer_queue.weights import Control, Gate, InPlace, Manifest, Receiver
from transfer_queue.weights.http.bodies import refusal_of
from transfer_queue.weights.http.server import control_app
from transfer_queue.weights.http.serving import HttpServer

TOKEN = "only for these tests"
INIT_INFO = {"way": "inline"}
WIDTH, LAYERS = 16, 4


class Inline:
    """`update_weights` takes {"manifest": base64, "buckets": {"0": base64}}, in one or many calls."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.connected = False

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if init_info != INIT_INFO:
            raise InvalidInput(f"init_info is {init_info}")
        self.connected = True

    def start_weight_update(self) -> None:
        self.receiver.abort("another update starts")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receiver.open(Manifest.decode(base64.b64decode(update_info["manifest"])), ROOM_S)
        for index, data in update_info["buckets"].items():
            self.receiver.stage(int(index), base64.b64decode(data))

    def finish_weight_update(self) -> None:
        self.receiver.verify()
        self.receiver.commit()

    def shutdown(self) -> None:
        self.connected = False


def infos(version: Version) -> list[dict[str, Any]]:
    """The parts of an update, one for each bucket."""
    manifest = base64.b64encode(version.manifest.encode()).decode()
    parts = [base64.b64encode(bucket.numpy().tobytes()).decode() for bucket in version.buckets]
    return [{"manifest": manifest, "buckets": {str(index): part}} for index, part in enumerate(parts)]


def model() -> torch.nn.Module:
    module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for tensor in module.parameters():
        tensor.detach().fill_(0)
    return module


def filled(value: float) -> dict[str, torch.Tensor]:
    """Weights of the model, all of them `value`."""
    return {name: torch.full_like(tensor.detach(), value) for name, tensor in model().named_parameters()}


def numbered(version: int, weights: dict[str, torch.Tensor] | None = None) -> Version:
    return full(weights or filled(version), version, bucket_nbytes=2048)


def faults(number: int) -> dict[str, list[dict[str, Any]]]:
    """Updates to version `number` that must be refused, by name."""
    good = infos(numbered(number))
    weights = filled(number)
    renamed = {("ghost" if name == "0.bias" else name): tensor for name, tensor in weights.items()}
    damaged = bytearray(base64.b64decode(good[0]["buckets"]["0"]))
    damaged[5] ^= 1
    return {
        "unknown tensor": infos(numbered(number, renamed)),
        "other shape": infos(numbered(number, {**weights, "0.bias": weights["0.weight"]})),
        "old version": infos(numbered(0)),
        "half of it": good[:1],
        "damaged": [{**good[0], "buckets": {"0": base64.b64encode(damaged).decode()}}, *good[1:]],
        "no manifest": [{"buckets": {}}],
        "odd types": [{"manifest": 3, "buckets": []}],
    }


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


class TinyServer:
    """Generates by looking at the weights, a step at a time: what it "says" is which values it saw in them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, **more: Any) -> None:
        self.gate = Gate()
        self.num_steps = 0
        self.receiver = Receiver(InPlace(model()), clock=clock)
        self.control = Control(Inline(self.receiver), self.receiver, generation=self.gate, **more)

    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/generate", self.generate, methods=["POST"]),
            Mount("/", control_app(self.control, TOKEN)),
        ]
        return Starlette(routes=routes)

    async def health(self, _request: Request) -> JSONResponse:
        return JSONResponse({"running": self.gate.running, "num_steps": self.num_steps})

    async def generate(self, request: Request) -> JSONResponse:
        body = await request.json()
        said: list[list[float]] = []
        reason = "length"
        try:
            async with self.gate.request(body.get("request_id", "")) as running:
                while len(said) < body["num_steps"]:
                    async with running.step():
                        said.append(await asyncio.to_thread(self.look))
                        self.num_steps += 1
        except Aborted:
            reason = "abort"
        except TransferQueueError as error:
            refusal = refusal_of(error)
            return JSONResponse(refusal.body(), refusal.status)
        return JSONResponse({"finish_reason": reason, "said": said})

    def look(self) -> list[float]:
        """The version it was told, and the smallest and largest weight."""
        with self.receiver.reading() as live:
            ends = [end for tensor in live.module.parameters() for end in (tensor.min().item(), tensor.max().item())]
            return [live.tag.version or 0, min(ends), max(ends)]


def main() -> None:
    """Serve until stdin ends; prints where."""
    torch.set_num_threads(1)
    tiny = TinyServer(allow_reset=True, world_size=2, data_parallel_size=3)
    with HttpServer(tiny.app(), "127.0.0.1", 0, TOKEN) as server:
        print(json.dumps(server.url), flush=True)
        sys.stdin.read()
