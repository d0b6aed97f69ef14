"""Structs that are decoded on their own have their fields looked up before two threads may decode one at once."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from paths import ROOT

FORKED = """
import os, sys, threading
from transfer_queue.weights.receive import status
sys.setswitchinterval(1e-7)
together = threading.Barrier(8)
def decode():
    together.wait()
    status.decode({"label": "v1"})
ends = []
for _ in range(20):
    pid = os.fork()
    if not pid:
        threads = [threading.Thread(target=decode) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    ends.append(os.waitpid(pid, 0)[1])
print(max(ends), flush=True)
"""


def decoded(tree: ast.AST) -> set[str]:
    """Names of classes that `msgspec.json.decode(..., type=)`, `msgspec.msgpack.decode` or `msgspec.convert` make."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("msgspec."):
            continue
        kinds = [keyword.value for keyword in node.keywords if keyword.arg == "type"]
        kinds += node.args[1:2] if ast.unparse(node.func) == "msgspec.convert" else []
        found |= {name.id for kind in kinds for name in ast.walk(kind) if isinstance(name, ast.Name)}
    return found


def test_every_struct_that_is_decoded_on_its_own_is_decodable() -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")]
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    names = set[str]().union(*map(decoded, trees)) & classes.keys()
    assert {"ServerStatus", "Manifest", "ServicePlace"} <= names
    assert names == {
        name for name in names if any(ast.unparse(one) == "decodable" for one in classes[name].decorator_list)
    }


def test_threads_that_decode_the_first_status_together_do_not_crash(child: Callable[[str], Any]) -> None:
    assert child(FORKED).line() == "0"
