"""What a sampler is: it picks rows from the ready ones of a partition, and says which of them are used up."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from transfer_queue.errors import ConfigError, InvalidSampling, UnsupportedValue
from transfer_queue.names import nearest
from transfer_queue.sampler.script import MAIN_NAMES, main_module

Ready: TypeAlias = "Sequence[int] | npt.NDArray[np.int64]"
Sampled: TypeAlias = tuple[list[int], list[int]]
Dealt: TypeAlias = tuple[list[list[int]], list[int]]  # the rows of each rank, and those that are consumed
SETTINGS = ("max_staleness", "untagged", "max_deliver")  # of the controller, which takes them out of a sampling_config
DP_SIZE = "dp_size"  # likewise, unless the sampler names it: see `deal`
KEYS = ("dp_rank", "batch_index", "task_name", "partition_id")  # what the samplers of this package know
NEVER = ("self", "ready_indexes", "batch_size", "partition")  # of a `sample`: not its caller's to give
REPEATED = ("task_name", "partition_id")  # every sampler is given those of the request


class PartitionView(Protocol):
    """The read-only view of a partition that the controller hands to samplers as `partition=`."""

    @property
    def any_tags(self) -> bool:
        """False when no row has tags, so that nobody needs to look; a view without this attribute counts as True."""

    def tags(self, index: int) -> Mapping[str, object] | None:
        """The row's tags; empty or None when it has none."""

    def get_custom_meta(self, global_indices: list[int]) -> dict[int, Any]:
        """index -> tags of those of these rows that have tags; one call for many rows."""


def tags_of(partition: PartitionView | None, rows: list[int]) -> list[Mapping[str, Any] | None] | None:
    """The tags of each row; None when no row has any. Takes views that lack some of the methods as well."""
    if not getattr(partition, "any_tags", True):
        return None
    many, one = getattr(partition, "get_custom_meta", None), getattr(partition, "tags", None)
    if callable(many):
        found = many(rows)
        return [found.get(row) for row in rows]
    return [one(row) for row in rows] if callable(one) else None


def as_list(rows: Ready) -> list[int]:
    """`rows` as a list of Python ints."""
    return rows.tolist() if isinstance(rows, np.ndarray) else list(rows)


def positive(value: object, what: str) -> int:
    """`value` as an int. InvalidSampling when it is not a whole number above 0."""
    found = whole_number(value, what)
    if found <= 0:
        raise InvalidSampling(f"{what} must be positive, got {value}")
    return found


def whole_number(value: object, what: str) -> int:
    """`value` as an int. InvalidSampling when it is not a whole number."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidSampling(f"{what} must be an int, got {value!r}") from None


def check_hashable(**values: object) -> None:
    """InvalidSampling when one of `values` cannot be a key."""
    for name, value in values.items():
        try:
            hash(value)
        except TypeError:
            raise InvalidSampling(f"{name} cannot be {value!r}") from None


class BaseSampler(ABC):
    """Chooses which ready rows a request gets.

    A sampler has no I/O and runs inside the controller, one call at a time. It may remember results in
    `_states[partition_id][task_name][dp_rank][batch_index]`, as (sampled, consumed) or as one list of rows, so that
    ranks which ask for the same batch get the same rows.

    The constructor arguments are remembered so that the sampler can be started in another process, see `spec`.
    """

    _states: dict[Any, Any]
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> BaseSampler:
        sampler = super().__new__(cls)
        sampler._arguments = (args, kwargs)
        sampler._states = {}  # here as well, for subclasses that do not call our __init__
        return sampler

    def __init__(self) -> None:
        self._states = {}

    @abstractmethod
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        """Picks from `ready_indexes`: the ready, unconsumed rows, ascending and without repeats.

        Args:
            batch_size: how many rows the caller asked for.
            kwargs: `partition`, a `PartitionView` or None; `partition_id` and `task_name`; what the caller's
                sampling_config holds, for instance `dp_rank` and `batch_index`.

        Returns:
            (sampled, consumed): the rows to hand out, and those that the task never gets again. Two empty lists mean
            that the ready rows do not suffice yet.

        Raises:
            InvalidSampling: a parameter is wrong. Nothing has changed then.
        """

    @property
    def reserves(self) -> bool:
        """Whether rows that `sample` consumes but does not hand out are remembered for later requests.

        They count as consumed only once those have fetched them.
        """
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Sampled:
        return self.sample(*args, **kwargs)

    def needs(self, batch_size: int) -> int | None:
        """How many of the first ready rows `sample` has to see for this batch size; None for all of them."""
        return None

    def least_ready(self, batch_size: int) -> int:
        """With fewer ready rows than this, `sample` is not called, except for a result it remembers."""
        return batch_size

    def deal(self, ready_indexes: list[int], batch_size: int, ranks: Sequence[int], **kwargs: Any) -> Dealt:
        """Picks one batch for several data-parallel ranks at once and divides it among them.

        One call of `sample` picks for all, without `dp_rank` and `batch_index`; each rank gets a run of the rows, and
        the runs differ by one row at most. A `sample` that names `dp_rank` is called once for each rank instead.

        Args:
            batch_size: the rows of all `ranks` together.
            ranks: who gets a share.
            kwargs: as for `sample`, with `batch_index`.

        Returns:
            (the rows of each rank in order, the rows that the task never gets again, these or more). Without any rows
            the ready ones do not suffice yet.
        """
        named = _named_by(type(self).sample)
        if "dp_rank" in named:
            return self._deal_each(ready_indexes, batch_size, ranks, kwargs)
        given = {name: value for name, value in kwargs.items() if name != "batch_index" or name in named}
        given.pop("dp_rank", None)
        sampled, consumed = self.sample(ready_indexes, batch_size, **given)
        return divided(sampled, len(ranks)), consumed

    def _deal_each(
        self, ready_indexes: list[int], batch_size: int, ranks: Sequence[int], kwargs: dict[str, Any]
    ) -> Dealt:
        left, shares, used = ready_indexes, [], []
        for rank, size in zip(ranks, parts_of(batch_size, len(ranks)), strict=True):
            sampled, consumed = self.sample(left, size, **{**kwargs, "dp_rank": rank}) if size else ([], [])
            if size and not sampled:
                return [[] for _ in ranks], []
            taken = {*sampled, *consumed}
            left = [row for row in left if row not in taken]
            shares.append(sampled)
            used += consumed
        return shares, used

    def check_request(self, batch_size: int, sampling_config: Mapping[str, Any]) -> None:
        """Refuses what no ready rows could satisfy; called once per request, before it may wait.

        Raises:
            InvalidSampling: a parameter is missing or wrong. Here: `sample` does not know its name.
        """
        known = _keys_of(type(self).sample)
        unknown = () if known is None else [key for key in sampling_config if key not in known]
        if known is not None and unknown:
            raise InvalidSampling(
                f"sampling_config: {type(self).__name__} does not know {unknown[0]!r}; "
                f"the nearest is {nearest(unknown[0], (*known, *SETTINGS, DP_SIZE))!r}"
            )

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether `sample` would repeat an earlier result for this `dp_rank` and `batch_index`."""
        config = sampling_config or {}
        rank, batch = config.get("dp_rank"), config.get("batch_index")
        if rank is None:
            return False
        check_hashable(dp_rank=rank, batch_index=batch)
        return batch in self._states.get(partition_id, {}).get(task_name, {}).get(rank, {})

    def clear_cache(self, partition_id: str) -> None:
        """Forgets all results of a partition."""
        self._states.pop(partition_id, None)

    def forget(self, partition: str, indexes: set[int]) -> None:
        """Drops every remembered result that contains one of these rows, which are gone and may be reused.

        The controller calls this before the rows' indexes can be given to other rows. Samplers that remember rows
        elsewhere, or in another layout, extend this and `clear_cache`. When a whole partition goes and neither was
        extended, only `clear_cache` is called; else this with all rows, and then `clear_cache`.
        """
        for task in list(self._states.get(partition, {})):
            self._forget_of_task(partition, task, indexes)

    def offer_again(self, partition: str, task: str, indexes: set[int]) -> None:
        """Drops every remembered result of this task that contains one of these rows: the task gets them anew.

        The controller calls this when a lease ends without acknowledgement. Samplers with their own `forget` forget
        the rows for all tasks unless they extend this as well.
        """
        if type(self).forget is BaseSampler.forget:
            self._forget_of_task(partition, task, indexes)
        else:
            self.forget(partition, indexes)

    def _forget_of_task(self, partition: str, task: str, indexes: set[int]) -> None:
        tasks = self._states.get(partition, {})
        ranks = tasks.get(task, {})
        for rank, batches in list(ranks.items()):
            for batch in [batch for batch, result in batches.items() if _holds_any(result, indexes)]:
                del batches[batch]
            if not batches:
                del ranks[rank]
        if not ranks:
            tasks.pop(task, None)
        if not tasks:
            self._states.pop(partition, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """The state that `load_checkpoint` restores. Subclasses with more state extend both."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Restores what `save_checkpoint` returned."""
        self._states = state["_states"]

    def spec(self) -> dict[str, Any]:
        """How to make this sampler in another process: `{"class": "module:QualName", "kwargs": {...}}`.

        `kwargs` are the constructor's arguments; an attribute of the same name counts instead when there is one.
        For a class of the main script, `main` is the path of that script.

        Raises:
            ConfigError: another process cannot import the class.
            UnsupportedValue: an argument is not plain data, or is not named by the constructor.
        """
        kwargs = {name: vars(self).get(name, value) for name, value in self._named_arguments().items()}
        return class_spec(type(self), _plain(kwargs, f"{type(self).__name__} argument"))

    def _named_arguments(self) -> dict[str, Any]:
        args, kwargs = self._arguments
        signature = inspect.signature(type(self).__init__)
        given = signature.bind(self, *args, **kwargs).arguments
        named: dict[str, Any] = {}
        for name, parameter in list(signature.parameters.items())[1:]:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named.update(given.get(name, {}))
            elif parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
                if given.get(name):
                    raise UnsupportedValue(f"{type(self).__name__}: only named arguments can be sent, not {name!r}")
            elif name in given or vars(self).get(name, parameter.default) != parameter.default:
                named[name] = given.get(name, parameter.default)
        return named


@functools.lru_cache(64)
def _keys_of(sample: Callable[..., Any]) -> tuple[str, ...] | None:
    """The keys of a sampling_config that this `sample` takes; None: any."""
    if getattr(sample, "__module__", "").startswith(f"{__package__}."):
        return KEYS
    try:
        parameters = inspect.signature(sample).parameters.values()
    except (TypeError, ValueError):
        return None  # not written in Python
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [parameter.name for parameter in parameters if parameter.kind in by_name]
    return (*REPEATED, *(name for name in named if name not in NEVER))


def _named_by(sample: Callable[..., Any]) -> Container[str]:
    """The parameters that a user's `sample` spells out."""
    if getattr(sample, "__module__", "").startswith(f"{__package__}."):
        return ()
    try:
        return inspect.signature(sample).parameters
    except (TypeError, ValueError):
        return ()


def takes(sampler: BaseSampler, key: str) -> bool:
    """Whether a key of a sampling_config is for this sampler's `sample`."""
    known = _keys_of(type(sampler).sample)
    return known is None or key in known


def parts_of(count: int, parts: int, unit: int = 1) -> list[int]:
    """`count` as `parts` numbers that differ by one `unit` at most, the larger ones first. Units stay whole."""
    each, more = divmod(count // unit, parts)
    return [unit * (each + (part < more)) for part in range(parts)]


def divided(rows: list[int], parts: int, unit: int = 1) -> list[list[int]]:
    """`rows` as runs of about the same length, see `parts_of`."""
    bounds = [0, *itertools.accumulate(parts_of(len(rows), parts, unit))]
    return [rows[start:stop] for start, stop in itertools.pairwise(bounds)]


def forgets_partitions(sampler: BaseSampler) -> bool:
    """Whether `clear_cache` forgets all that `forget` would for every row of a partition: both are ours."""
    own = f"{__package__}."
    return all(
        getattr(method, "__module__", "").startswith(own)
        for method in (type(sampler).forget, type(sampler).clear_cache)
    )


def class_spec(cls: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The spec of `cls(**kwargs)`. ConfigError when another process cannot import the class."""
    if inspect.isabstract(cls):
        raise ConfigError(f"{cls.__qualname__} is abstract: it has no sample()")
    if "<locals>" in cls.__qualname__:
        raise ConfigError(
            f"the controller's process cannot import the sampler class {cls.__module__}:{cls.__qualname__}; "
            f"define it at the top level of a module"
        )
    if cls.__module__ not in MAIN_NAMES:
        return {"class": f"{cls.__module__}:{cls.__qualname__}", "kwargs": kwargs}
    module, path = main_module(cls)
    return {"class": f"{module}:{cls.__qualname__}", **({"main": path} if path else {}), "kwargs": kwargs}


def _holds_any(result: Any, indexes: set[int]) -> bool:
    """Whether a remembered result, a list of rows or several of those, has one of `indexes`."""
    if not isinstance(result, (list, tuple)):
        return False
    if result and isinstance(result[0], (list, tuple)):
        return any(_holds_any(part, indexes) for part in result)
    return not indexes.isdisjoint(result)


def _plain(value: Any, what: str) -> Any:
    """`value` when it is data that every process reads the same way, tuples as lists."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, what) for item in value]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _plain(item, f"{what} {key!r}") for key, item in value.items()}
    raise UnsupportedValue(f"{what} is not plain data: {value!r}")
