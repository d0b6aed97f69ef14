"""Samplers choose which ready rows a request gets; a spec names one so that another process can make it.

Samplers come only from whoever starts the controller. No socket accepts a spec.

    base                              what a sampler is, and what it sees of a partition
     ├─ sequential_sampler            rows in the order of their indexes
     ├─ grpo_group_n_sampler          whole groups: all answers to one prompt, or none
     ├─ rank_aware_sampler            the same rows for every process of a data-parallel rank
     ├─ seqlen_balanced_sampler       about the same number of tokens for each rank
     └─ streaming_token_budget_sampler    micro-batches by a budget of tokens
    script                            samplers of the program that is run, brought to the controller's process
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import ConfigError, UnsupportedValue
from transfer_queue.sampler.base import BaseSampler, PartitionView, class_spec
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.rank_aware_sampler import RankAwareSampler
from transfer_queue.sampler.script import MAIN, run_main
from transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler
from transfer_queue.sampler.sequential_sampler import SequentialSampler
from transfer_queue.sampler.streaming_token_budget_sampler import StreamingTokenBudgetSampler

__all__ = [
    "BaseSampler",
    "GRPOGroupNSampler",
    "PartitionView",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StreamingTokenBudgetSampler",
    "from_spec",
    "resolve",
]

ENTRY_POINTS = "transfer_queue.samplers"

_BUILT_IN: dict[str, type[BaseSampler]] = {
    cls.__name__: cls
    for cls in (
        SequentialSampler,
        GRPOGroupNSampler,
        RankAwareSampler,
        SeqlenBalancedSampler,
        StreamingTokenBudgetSampler,
    )
}


def resolve(sampler: object) -> dict[str, Any]:
    """The spec of a sampler given as name, `module:Class` path, class, instance or spec.

    A name is that of a built-in sampler or of an entry point in the group `transfer_queue.samplers`.

    Raises:
        ConfigError: no such name, module or class, or one that another process cannot import.
        UnsupportedValue: something else than a sampler, or arguments that are not plain data.
    """
    if isinstance(sampler, BaseSampler):
        return sampler.spec()
    if isinstance(sampler, str):
        return class_spec(_load(sampler), {})
    if isinstance(sampler, type) and issubclass(sampler, BaseSampler):
        return class_spec(sampler, {})
    if isinstance(sampler, Mapping) and "class" in sampler:
        return from_spec({name: sampler[name] for name in ("class", "kwargs") if name in sampler}).spec()
    raise UnsupportedValue(f"sampler must be a BaseSampler class or instance, or the name of one, not {sampler!r}")


def from_spec(spec: Mapping[str, Any]) -> BaseSampler:
    """A new sampler as `spec` says; it starts without remembered results.

    Raises:
        ConfigError: there is no such class, its module fails, or it does not take these arguments.
    """
    name, kwargs = spec.get("class"), dict(spec.get("kwargs") or {})
    if not isinstance(name, str):
        raise ConfigError(f"a sampler spec names its class, this one does not: {dict(spec)}")
    cls = _load(name, spec.get("main"))
    try:
        return cls(**kwargs)
    except Exception as error:
        raise ConfigError(f"sampler {name} cannot be made with {kwargs}: {_reason(error)}") from error


def _load(name: str, main: str | None = None) -> type[BaseSampler]:
    """The class of that name; `__main__` is the script `main`, or this process's own one."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    module, _, path = (name if ":" in name else _registered(name)).partition(":")
    try:
        found: Any = run_main(main) if main and module == MAIN else importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # what a module does on import is anybody's code
        raise ConfigError(f"sampler {name!r} cannot be imported{_from(main)}: {_reason(error)}") from error
    if not (isinstance(found, type) and issubclass(found, BaseSampler)):
        raise UnsupportedValue(f"sampler {name!r} is not a BaseSampler class")
    return found


def _registered(name: str) -> str:
    """The `module:Class` path that an installed package registered under `name`."""
    from importlib.metadata import entry_points  # its own imports take longer than all of this package's

    found = {f"{point.module}:{point.attr}" for point in entry_points(group=ENTRY_POINTS, name=name)}
    if len(found) > 1:
        raise ConfigError(f"sampler {name!r} is registered more than once: {sorted(found)}; name one as 'module:Class'")
    if not found:
        known = sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))})
        raise ConfigError(f"unknown sampler {name!r}: expected one of {known} or a 'module:Class' path")
    return found.pop()


def _from(main: str | None) -> str:
    return f" from {main}" if main else ""


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
