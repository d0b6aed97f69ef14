"""What of an SGLang server our adapter meets: its routes, and tensor-parallel workers as processes.

    python -c "... sglang_servers.run(RANK, WORLD, FOLDER)"

is one worker: `load TEXT` hands it what a post carried for it, `fail` lets its loader raise once, `hold` lets it wait
for a line, `timeout S` is its patience with the others (from its next load on: `hurry S`), whatever an update has left.
`weights` prints what it serves, `installed` what it says it does. Posts are read as far as that is safe: nothing of the
pickle is run, its bytes are a storage.
"""

from __future__ import annotations

import base64
import io
import json
import pickletools
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from conftest import Child

from transfer_queue.integrations.sglang.loader import _PLACE, load
from transfer_queue.integrations.sglang.payload import LOADER, from_tensor
from transfer_queue.integrations.workers import ranks

CODE = "import sys; sys.path[:0] = ['tests', 'tests/helpers']; import sglang_servers; sglang_servers.run({}, {}, {!r})"
ROWS, COLUMNS = 4, 3


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"up.weight": torch.full((ROWS, COLUMNS), value), "norm.weight": torch.full((COLUMNS,), value)}


def tensor_in(text: str) -> torch.Tensor:
    """The one tensor that a post carried for a rank."""
    found = [one for _, one, _ in pickletools.genops(base64.b64decode(text, validate=True)) if isinstance(one, bytes)]
    storage = torch.load(io.BytesIO(found[0]), weights_only=True)
    return torch.empty(0, dtype=torch.uint8).set_(storage._untyped_storage)


class Part(torch.nn.Module):
    """A rank's rows of `up`, and all of `norm`, by a loader like SGLang's: it skips what it does not know."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.start, self.rows = rank * (ROWS // world), ROWS // world
        self.up, self.norm = torch.nn.Linear(COLUMNS, self.rows, bias=False), torch.nn.LayerNorm(COLUMNS, bias=False)
        self.fails = self.holds = False
        self.patience_s = ranks.TIMEOUT_S

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self.holds:
            self.holds = False
            sys.stdin.readline()
        ranks.TIMEOUT_S = self.patience_s
        own = dict(self.named_parameters())
        for name, tensor in tensors:
            part = tensor.narrow(0, self.start, self.rows) if name == "up.weight" else tensor
            if name in own:
                own[name].data.copy_(part)
            if self.fails:
                self.fails = False
                raise RuntimeError("as the test wanted")


def run(rank: int, world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    group = SimpleNamespace(world_size=world, rank_in_group=rank, cpu_group=dist.group.WORLD)
    context: Any = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(tp_group=group)
    context.get_server_args = lambda: SimpleNamespace(model_path=folder, revision=None, load_format="auto")
    above: Any = ModuleType("sglang.srt")
    above.runtime_context = context
    sys.modules.update({"sglang": ModuleType("sglang"), "sglang.srt": above, "sglang.srt.runtime_context": context})
    ask = ranks.Ranks.all
    ranks.Ranks.all = lambda self, well, _timeout_s=0.0: ask(self, well)  # type: ignore[assignment, method-assign]
    model = Part(rank, world)
    model.load_weights(iter(weights(1.0).items()))
    print("ready")
    for line in sys.stdin:
        what, _, text = line.strip().partition(" ")
        if what == "load":
            load(model, [("transfer_queue", tensor_in(text))])
        elif what == "nonsense":
            load(model, [("transfer_queue", torch.tensor([1, 2, 3], dtype=torch.uint8))])
            load(model, [])
        elif what == "fail":
            model.fails = True
        elif what == "hold":
            model.holds = True
        elif what == "timeout":
            ranks.TIMEOUT_S = model.patience_s = float(text)
        elif what == "hurry":
            model.patience_s = float(text)
        elif what == "installed":
            found = model.__dict__[_PLACE].installed()
            print(json.dumps([found.version, found.dirty]))
            continue
        print(json.dumps([model.up.weight.unique().tolist(), model.norm.weight.unique().tolist()]))
    dist.destroy_process_group()


class Workers:
    """Those of one server, which all get the same."""

    def __init__(self, child: Callable[[str], Child], folder: Path, world: int) -> None:
        self.children = [child(CODE.format(rank, world, str(folder))) for rank in range(world)]
        for one in self.children:
            assert one.line() == "ready"
        self.is_late = self.is_held = False

    def say(self, texts: list[str]) -> list[Any]:
        """`is_late`: the last worker hears it when the others are done. `is_held`: it then hears that it may go on."""
        *others, last = self.children
        for one, text in zip(self.children, texts, strict=True):
            if not (self.is_late and one is last):
                one.say(text)
        found = [json.loads(one.line()) for one in others]
        if self.is_late or self.is_held:
            last.say(texts[-1] if self.is_late else "go")
            self.is_late = self.is_held = False
        return [*found, json.loads(last.line())]

    def installed(self) -> list[tuple[int | None, bool]]:
        return [(version, dirty) for version, dirty in self.say(["installed"] * len(self.children))]

    def values(self) -> set[float]:
        """What the weights of all of them are made of: one value, when they are of one version."""
        found = self.say(["weights"] * len(self.children))
        return {value for tensors in found for tensor in tensors for value in tensor}


class SGLangShaped:
    """The routes, in SGLang's order of things. `log`: what was done, by a word each."""

    def __init__(self, workers: Workers | None, **info: Any) -> None:
        self.workers = workers
        self.num = len(workers.children) if workers else 1
        self.info = {"tp_size": self.num, "dp_size": 1, "pp_size": 1, "custom_weight_loader": [LOADER], **info}
        self.log: list[str] = []
        self.before_finish: set[float] = set()
        self.is_late = self.is_held = False  # the last worker, when the others have done the next `finish`
        self.refused = ""  # a path that answers 400
        self.label = "default"
        self.is_open = False
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        with self._lock:
            if path == self.refused:
                return 400, {"success": False, "message": "as the test wanted"}
            return getattr(self, path[1:])(body)

    def server_info(self, body: Any) -> tuple[int, Any]:
        return 200, self.info

    def model_info(self, body: Any) -> tuple[int, Any]:
        return 200, {"weight_version": self.label}

    def update_weight_version(self, body: Any) -> tuple[int, Any]:
        assert body["abort_all_requests"] is False
        self.label = body["new_version"]
        return 200, {"success": True}

    def pause_generation(self, body: Any) -> tuple[int, Any]:
        self.log.append(body["mode"])
        return 200, {"status": "ok"}

    def continue_generation(self, body: Any) -> tuple[int, Any]:
        self.log.append("continue")
        return 200, {"status": "ok"}

    def begin_weight_update(self, body: Any) -> tuple[int, Any]:
        was_open, self.is_open = self.is_open, True
        self.log.append("refused" if was_open else "begin")
        return (400 if was_open else 200), {"success": not was_open, "message": "a session is open"}

    def end_weight_update(self, body: Any) -> tuple[int, Any]:
        was_open, self.is_open = self.is_open, False
        self.log.append("end")
        return (200 if was_open else 400), {"success": was_open, "message": "no session is open"}

    def flush_cache(self, body: Any) -> tuple[int, Any]:
        self.log.append("flush")
        return 200, "Cache flushed."

    def update_weights_from_tensor(self, body: Any) -> tuple[int, Any]:
        texts = body["serialized_named_tensors"]
        assert (self.is_open, len(texts), body["load_format"], body["selector"]) == (True, self.num, LOADER, "target")
        method = from_tensor(tensor_in(texts[0])).method
        self.log.append(method)
        if self.workers is not None:
            if method == "finish":
                self.before_finish = self.workers.values()
                self.workers.is_late, self.workers.is_held = self.is_late, self.is_held
                self.is_late = self.is_held = False
            self.workers.say([f"load {text}" for text in texts])
        self.label = self.label if body["weight_version"] is None else body["weight_version"]
        return 200, {"success": True, "message": "Success"}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                status, found = server.answer(self.path, json.loads(self.rfile.read(size)) if size else None)
                text = (found if isinstance(found, str) else json.dumps(found)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                return

        return Handler
