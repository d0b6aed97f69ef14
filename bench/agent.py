"""The process that does the work: reads one JSON command a line from stdin, answers one JSON line on stdout.

Run as a script by any of the interpreters, as `agent.py SYSTEM`. A command is {"id", "op": "file.function", "args"};
the operation is that function of `bench/ops/`, called with this process's Session. What libraries print to stdout goes
to stderr, so that it can't end up between answers.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 10.0
FROM_REPOSITORY = ("ours", "ours-ray", "plain")


def find_packages(system: str) -> None:
    """Make `bench` importable, and from the repository also `transfer_queue`, for ours only.

    The peers' own transfer_queue must win over the repository's, so the root goes last for them, and the directory of
    this script, which holds modules of other names' sakes, goes altogether.
    """
    sys.path[:] = [
        entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, ROOT / "src", ROOT / "bench")
    ]
    if system in FROM_REPOSITORY:
        sys.path.insert(0, str(ROOT / "src"))
    sys.path.append(str(ROOT))


def perform(session: Any, op: str, args: dict[str, Any]) -> dict[str, Any]:
    """Run one operation; its module is imported on first use."""
    module, _, function = op.partition(".")
    result: dict[str, Any] = getattr(importlib.import_module(f"bench.ops.{module}"), function)(session, **args)
    return result


def answer(session: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Perform a command and describe the outcome; an error in it is an answer too, its traceback goes to the log."""
    try:
        return {"id": command["id"], "ok": True, "result": perform(session, command["op"], command["args"])}
    except Exception as error:  # noqa: BLE001 - whatever a system under test raises becomes its row's text
        traceback.print_exc()
        return {"id": command["id"], "ok": False, "error": f"{type(error).__name__}: {error}"[:500]}


def end_with(parent: int) -> None:
    """Exit some time after the parent was lost: a call of a system whose other half is gone may never return."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(GRACE_S)
    os._exit(1)


def main() -> None:
    """Work until the driver says "stop" or is gone; leave the system in either case."""
    system = sys.argv[1]
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    find_packages(system)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    session = importlib.import_module("bench.session").Session(system)
    stopped = None
    try:
        for line in sys.stdin:
            command = json.loads(line)
            if command["op"] == "stop":
                stopped = command["id"]
                break
            replies.write(json.dumps(answer(session, command)) + "\n")
    finally:
        session.close()
    if stopped is not None:
        replies.write(json.dumps({"id": stopped, "ok": True, "result": {}}) + "\n")


if __name__ == "__main__":
    main()
