"""Samplers choose which ready rows a request gets; a spec names one so that another process can make it.

Samplers come only from whoever starts the controller. No socket accepts a spec.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import ConfigError, InvalidInput, UnsupportedValue
from transfer_queue.sampler.base import BaseSampler, PartitionView, class_path
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.sequential_sampler import SequentialSampler

__all__ = [
    "BaseSampler",
    "GRPOGroupNSampler",
    "PartitionView",
    "SequentialSampler",
    "from_spec",
    "resolve",
]

_BUILT_IN: dict[str, type[BaseSampler]] = {cls.__name__: cls for cls in (SequentialSampler, GRPOGroupNSampler)}


def resolve(sampler: object) -> dict[str, Any]:
    """The spec of a sampler given as built-in name, `module:Class` path, class, instance or spec.

    Raises:
        ConfigError: no such built-in, module or class, or one that another process cannot import.
        UnsupportedValue: something else than a sampler, or arguments that are not plain data.
    """
    if isinstance(sampler, BaseSampler):
        return sampler.spec()
    if isinstance(sampler, str):
        return {"class": class_path(_load(sampler)), "kwargs": {}}
    if isinstance(sampler, type) and issubclass(sampler, BaseSampler):
        return {"class": class_path(sampler), "kwargs": {}}
    if isinstance(sampler, Mapping) and "class" in sampler:
        return from_spec(sampler).spec()
    raise UnsupportedValue(f"sampler must be a BaseSampler class or instance, or the name of one, not {sampler!r}")


def from_spec(spec: Mapping[str, Any]) -> BaseSampler:
    """A new sampler as `spec` says; it starts without remembered results.

    Raises:
        ConfigError: there is no such class, or it does not take these arguments.
    """
    name, kwargs = spec.get("class"), dict(spec.get("kwargs") or {})
    if not isinstance(name, str):
        raise ConfigError(f"a sampler spec names its class, this one does not: {dict(spec)}")
    cls = _load(name)
    try:
        return cls(**kwargs)
    except (TypeError, InvalidInput) as error:
        raise ConfigError(f"sampler {name} cannot be made with {kwargs}: {error}") from error


def _load(name: str) -> type[BaseSampler]:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    module, colon, path = name.partition(":")
    if not colon:
        raise ConfigError(f"unknown sampler {name!r}: expected one of {sorted(_BUILT_IN)} or a 'module:Class' path")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"sampler {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, BaseSampler)):
        raise UnsupportedValue(f"sampler {name!r} is not a BaseSampler class")
    return found
