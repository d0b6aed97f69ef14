"""What an agent process holds between commands."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.digest import Digest
    from bench.systems import System

ADAPTERS = {
    "ours": "bench.systems:Ours",
    "ours-ray": "bench.systems:Ours",
    "tq": "bench.systems:Released",
    "ray": "bench.ray_store:RayStore",
    "ray-head": "bench.ray_store:RayHead",
}


@dataclass
class Session:
    """State of one agent: its system's adapter (made on first use, so that a fresh process has imported nothing),
    payloads by their specification, digests expected of them, and whatever a case keeps between operations."""

    name: str
    payloads: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Digest] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)
    _system: System | None = None

    @property
    def system(self) -> System:
        if self._system is None:
            module, _, name = ADAPTERS[self.name].partition(":")
            self._system = getattr(importlib.import_module(module), name)()
        assert self._system is not None
        return self._system

    @property
    def tq(self) -> Any:
        """The system's `transfer_queue` module; AttributeError for systems that are none."""
        return self.system.tq  # type: ignore[attr-defined]

    def keys(self, num: int, positions: Sequence[int] | None = None) -> list[str]:
        """Keys of rows 0..num, or of the given positions among them; the list of all is made once."""
        every: list[str] = self.scratch.setdefault(f"keys{num}", [f"row-{i:07d}" for i in range(num)])
        return every if positions is None else [every[i] for i in positions]

    def close(self) -> None:
        """Leave the system; the process ends after this."""
        self.scratch.clear()
        self.payloads.clear()
        if self._system is not None:
            self._system.close()


def spec_name(spec: dict[str, Any]) -> str:
    """One name for one payload specification."""
    return json.dumps(spec, sort_keys=True)
