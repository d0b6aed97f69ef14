"""The usual other ways of bringing weights to a running process: collectives, files, and pickles over HTTP."""

from __future__ import annotations

import http.client
import io
import os
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from bench.session import Session
from transfer_queue.weights.version.sources import ModuleSource

BUFFER_NBYTES = 1 << 30  # vLLM's and verl's
TIMEOUT_S = 300


def meet(session: Session, rank: int, port: int) -> dict[str, Any]:
    """A gloo group of two."""
    del session
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S))
    return {}


def part(session: Session) -> dict[str, Any]:
    del session
    dist.destroy_process_group()
    return {}


def broadcast(session: Session) -> dict[str, Any]:
    """Each tensor from rank 0 into the live ones of rank 1."""
    before = time.monotonic()
    for tensor in session.scratch["model"].parameters():
        dist.broadcast(tensor.detach(), 0)
    return {"s": time.monotonic() - before}


def broadcast_packed(session: Session) -> dict[str, Any]:
    """Tensors packed into two buffers in turn: while one travels, the other is packed or unpacked. The buffers stay
    from one update to the next, as those of our engines do."""
    chunks = _chunks([tensor.detach() for tensor in session.scratch["model"].parameters()])
    sending = dist.get_rank() == 0
    size = max(sum(one.nbytes for one in tensors) for tensors in chunks)
    buffers = session.scratch.setdefault("packed", [])
    if not buffers:
        buffers += [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
    before = time.monotonic()
    travelling: list[Any] = []
    for number, tensors in enumerate(chunks):
        buffer = buffers[number % 2][: sum(one.nbytes for one in tensors)]
        if sending:
            torch.cat([one.view(-1).view(torch.uint8) for one in tensors], out=buffer)
        travelling.append((dist.broadcast(buffer, 0, async_op=True), buffer, tensors))
        if len(travelling) == 2:
            _arrived(*travelling.pop(0), sending)
    for one in travelling:
        _arrived(*one, sending)
    return {"s": time.monotonic() - before}


def _chunks(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """As many as two buffers hold, in halves of the model when that is smaller."""
    limit = min(BUFFER_NBYTES, sum(one.nbytes for one in tensors) // 2)
    chunks: list[list[torch.Tensor]] = [[]]
    for one in tensors:
        if sum(other.nbytes for other in chunks[-1]) >= limit:
            chunks.append([])
        chunks[-1].append(one)
    return chunks


def _arrived(work: Any, buffer: torch.Tensor, tensors: list[torch.Tensor], sending: bool) -> None:
    work.wait()
    start = 0
    for one in [] if sending else tensors:
        one.copy_(buffer[start : start + one.nbytes].view(one.dtype).view(one.shape))
        start += one.nbytes


def save(session: Session, folder: str) -> dict[str, Any]:
    before = time.monotonic()
    os.makedirs(folder, exist_ok=True)
    weights = {name: tensor.detach() for name, tensor in ModuleSource(session.scratch["model"]).tensors()}
    save_file(weights, f"{folder}/model.safetensors")
    return {"s": time.monotonic() - before}


def reload(session: Session, folder: str) -> dict[str, Any]:
    before = time.monotonic()
    session.scratch["model"].load_state_dict(load_file(f"{folder}/model.safetensors"))
    return {"s": time.monotonic() - before}


def serve(session: Session) -> dict[str, Any]:
    """Take what torch.save wrote, in the body of a POST; the answer says for how long the model was being loaded."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = io.BytesIO(self.rfile.read(int(self.headers["Content-Length"])))
            before = time.monotonic()
            session.scratch["model"].load_state_dict(torch.load(body, weights_only=True))
            said = repr(time.monotonic() - before).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

    server = session.scratch["http"] = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return {"port": server.server_port}


def stop_serving(session: Session) -> dict[str, Any]:
    server = session.scratch.pop("http")
    server.shutdown()
    server.server_close()
    return {}


def post(session: Session, port: int) -> dict[str, Any]:
    before = time.monotonic()
    body = io.BytesIO()
    torch.save(session.scratch["model"].state_dict(), body)
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    link.request("POST", "/", body.getbuffer())
    paused = float(link.getresponse().read())
    link.close()
    return {"s": time.monotonic() - before, "pause": paused}
