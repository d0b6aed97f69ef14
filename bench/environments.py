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


REVERB = Environment(
    folder=ROOT / ".venv-reverb",
    steps=(("dm-reverb[tensorflow]==0.14.0",),),
    versions=(("dm-reverb", "0.14.0"), ("numpy", "")),
)
REDIS = Environment(folder=ROOT / ".venv-redis", steps=(("numpy", "redis"),), versions=(("redis", ""), ("numpy", "")))


def reverb_python(log: Path) -> Path:
    """As `peer_python`: an interpreter that has Reverb, with the TensorFlow that it was built for (1.6 GB)."""
    return made(REVERB, log)


def redis_python(log: Path) -> Path:
    """As `peer_python`: an interpreter that has the client of Redis. `redis-server` has to be on the PATH."""
    return made(REDIS, log)
