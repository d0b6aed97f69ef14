"""The interpreter of the systems under test, with packages of its own."""

from __future__ import annotations

from pathlib import Path

from tools.environments import Environment, EnvironmentUnavailable, has, made

__all__ = ["ROOT", "EnvironmentUnavailable", "peer_python"]

ROOT = Path(__file__).resolve().parent.parent
PEERS = Environment(
    folder=ROOT / ".venv-peers",
    steps=(("torch==2.13.0",), ("TransferQueue==0.1.11", "ray[default]")),
    versions=(("TransferQueue", "0.1.11"), ("ray", ""), ("torch", "")),
)


def peer_python(override: Path | None, log: Path) -> Path:
    """Return an interpreter that has TransferQueue 0.1.11 and ray.

    Creates `.venv-peers` in the repository root when it is missing or incomplete (minutes, needs the package index;
    output goes to `log`). `override` is only checked, never changed. Raises EnvironmentUnavailable.
    """
    if override is None:
        return made(PEERS, log)
    if not has(override, PEERS.versions):
        raise EnvironmentUnavailable(f"{override} does not have TransferQueue 0.1.11 and ray")
    return override.absolute()
