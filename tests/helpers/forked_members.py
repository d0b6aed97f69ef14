"""For the program of a `tq doctor`: the processes of its trials are forked by the test's zygote, which has torch.

They are processes like those that the doctor starts, in its namespaces, with its descriptors; their parent is another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from zygote import Child, ask

WHERE = "ZYGOTE"
NAMESPACES = ("mnt", "net")


def use() -> None:
    """From now on, in this process."""
    from transfer_queue.doctor import member_process

    member_process.subprocess = SimpleNamespace(  # type: ignore[assignment]
        **{**vars(member_process.subprocess), "Popen": _popen}
    )


def _popen(command: list[str], *, stdin: int, stdout: Any, env: Mapping[str, str], **options: Any) -> Child:
    assert command[0] == sys.executable
    assert options == {"stderr": stdout, "start_new_session": True}
    entered = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES] if os.getuid() == 0 else []
    job = {"arguments": command[1:], "environment": dict(env), "cwd": os.getcwd(), "own": True}
    job |= {"numbers": [0, 1, 2], "namespaces": len(entered)}
    child = Child(ask(os.environ[WHERE], job, [stdin, stdout.fileno(), stdout.fileno(), *entered]))
    for one in entered:
        os.close(one)
    return child
