"""A pytest plugin for NeMo-RL's own tests: a Ray of two processors, and the pin that an installed NeMo-RL would tell.

Their `tests/unit/conftest.py` starts a cluster for models; the tests of the data plane need any.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest
import ray

_requires = importlib.metadata.requires


def requires(distribution: str) -> list[str] | None:
    """Its adapter looks up which release to install in the actors of the queue, and fails without an answer."""
    return ["TransferQueue"] if distribution == "nemo-rl" else _requires(distribution)


importlib.metadata.requires = requires


@pytest.fixture(scope="session", autouse=True)
def init_ray_cluster() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
