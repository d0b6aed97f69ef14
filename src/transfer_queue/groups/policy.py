"""Which groups a trainer gets at a version of the weights, which ones are given up, and how many may be started.

All policies are settings of one mechanism. `windowed`, `ready_first`, `weight_fifo` and `in_order` are NeMo-RL's
samplers of these names, `drop` and `dropless` verl's two strategies for what is off policy. `prioritized` is
experience replay by priority (Schaul et al. 2016), with Reverb's rate limiter.
"""

from __future__ import annotations

import math
import operator
from functools import cache
from typing import Any, Literal, TypeAlias, get_type_hints

import msgspec

from transfer_queue.errors import InvalidInput

Serve: TypeAlias = Literal["window", "ready", "cohort", "target", "dropless"]
Order: TypeAlias = Literal["arrival", "freshest", "oldest", "priority", "weighted"]
MAX_COUNT = 1 << 32
MAX_PRIORITY, MAX_EXPONENT = 1e12, 10.0


class GroupPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a pool of groups. v is the trainer's version, w the version that a group is judged by.

    `serve`, the groups that are eligible. "window": v - window <= w <= v. "ready": w <= v. "cohort": of the groups
    within the window the oldest w only, so a trainer waits for all that were started at it. "target": those that were
    started for exactly v. "dropless": all, but none while an unfinished one is `window` versions behind.
    `window` is in versions; None: no limit. `order`: of arrival, newest w first, oldest w first, highest priority
    first, or drawn at random in proportion to priority ** `priority_exponent`, without repeats in one selection. The
    same `seed`, priorities and calls give the same draws. A group of priority 0 is not drawn.

    `stale`, what becomes of a sealed group below the window (with "target": whose version has passed): "keep",
    "evict" (its rows are cleared), or "withhold": its stale members' rows are held back, while their rewards still
    count. `aborts`: an unfinished group below the window is given up as well. `judge`: w is the version that the group
    was started at, or the "oldest" or "newest" one that its members name.

    A group is used up by its acknowledgement number `max_times_sampled`; before that it is offered again at once. None:
    never, so a `capacity` or a window has to bound how many there are. `capacity`: where there are more finished groups
    than this, the oldest one is evicted, and where somebody has it, as soon as it comes back.

    `gate`: groups may be started for so many versions ahead, at `groups_per_version` each; None: as many as you like.
    `samples_per_insert`, instead of a gate, keeps `samples_per_insert * sealed - selected` (both in total) within
    `error_buffer` (default: `samples_per_insert * min_size_to_sample`) of `samples_per_insert * min_size_to_sample`:
    producers wait for tickets above, consumers wait below. What was owed to groups that were evicted is forgiven
    (docs/groups.md), so with a window `stale` is not "keep". It is at most `max_times_sampled`. Nobody selects while
    there are fewer groups than `min_size_to_sample`.
    `shortfall`, where a group of a "target" was given up: another one may "replace" it, or the version "shrink"s, down
    to `floor` (a share of `groups_per_version`).

    A slot is tried at most `max_attempts` times. `retry`: a failed attempt starts that "sibling" anew, or the whole
    "group".

    Raises `InvalidInput` for settings that mean nothing.
    """

    serve: Serve = "ready"
    window: int | None = None
    order: Order = "arrival"
    stale: Literal["keep", "evict", "withhold"] = "keep"
    aborts: bool = False
    judge: Literal["start", "oldest", "newest"] = "start"
    gate: int | None = None
    groups_per_version: int = 1
    shortfall: Literal["replace", "shrink"] = "replace"
    floor: float = 1.0
    max_attempts: int = 3
    retry: Literal["sibling", "group"] = "sibling"
    priority_exponent: float = 1.0
    max_times_sampled: int | None = 1
    capacity: int | None = None
    samples_per_insert: float | None = None
    min_size_to_sample: int = 1
    error_buffer: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)
        _check_replay(self)
        if self.groups_per_version < 1 or self.max_attempts < 1:
            raise InvalidInput("groups_per_version and max_attempts are 1 or more")
        if not 0.0 <= self.floor <= 1.0:
            raise InvalidInput(f"floor {self.floor}: expected a share from 0 to 1")
        if self.window is None and (self.serve in ("window", "cohort", "dropless") or self.needs_window):
            raise InvalidInput(f"a policy that serves {self.serve!r}, or evicts or withholds, needs a window")
        if self.serve == "target" and self.gate is None:
            raise InvalidInput("a policy that serves a target needs a gate: it says which version a group is for")

    @property
    def needs_window(self) -> bool:
        """Whether groups are judged by a window."""
        return self.stale == "withhold" or (self.serve != "target" and (self.stale != "keep" or self.aborts))

    @property
    def by_priority(self) -> bool:
        """Whether the order depends on priorities."""
        return self.order in ("priority", "weighted")

    @property
    def needs_ticket(self) -> bool:
        """Whether a group is opened with a ticket only."""
        return self.gate is not None or self.samples_per_insert is not None

    @property
    def least(self) -> int:
        """How many groups a version has at least, where it shrinks."""
        return math.ceil(self.floor * self.groups_per_version)

    @classmethod
    def windowed(cls, window: int, *, freshest_first: bool = False) -> GroupPolicy:
        """Groups at most `window` versions old; older ones are evicted, and given up while they are unfinished."""
        order: Order = "freshest" if freshest_first else "arrival"
        return cls(serve="window", window=window, order=order, stale="evict", aborts=True)

    @classmethod
    def ready_first(cls, gate: int, groups_per_version: int) -> GroupPolicy:
        """Whatever is ready, in order of arrival; only the gate bounds how old it is."""
        return cls(serve="ready", gate=gate, groups_per_version=groups_per_version)

    @classmethod
    def weight_fifo(cls, window: int, groups_per_version: int) -> GroupPolicy:
        """All groups of the oldest version in the window before any of the next."""
        return cls(serve="cohort", window=window, gate=window, groups_per_version=groups_per_version, stale="evict")

    @classmethod
    def in_order(cls, lead: int, groups_per_version: int, *, shrink: bool = False, floor: float = 1.0) -> GroupPolicy:
        """Each group is for one version, `lead` versions ahead at most, and only that one gets it."""
        return cls(
            serve="target", gate=lead, groups_per_version=groups_per_version, stale="evict",
            shortfall="shrink" if shrink else "replace", floor=floor,
        )  # fmt: skip

    @classmethod
    def drop(cls, max_span: int) -> GroupPolicy:
        """Oldest first; a finished group of more than `max_span` steps, its own included, is evicted."""
        return cls(serve="window", window=_span(max_span) - 1, order="oldest", stale="evict")

    @classmethod
    def dropless(cls, max_span: int) -> GroupPolicy:
        """Oldest first, none is evicted: who selects waits while an unfinished one has `max_span` steps."""
        return cls(serve="dropless", window=_span(max_span) - 1, order="oldest")

    @classmethod
    def prioritized(
        cls,
        capacity: int,
        *,
        priority_exponent: float = 1.0,
        max_times_sampled: int | None = None,
        samples_per_insert: float | None = None,
        min_size_to_sample: int = 1,
        error_buffer: float | None = None,
        seed: int = 0,
    ) -> GroupPolicy:
        """Drawn in proportion to priority ** `priority_exponent`, again and again; the newest `capacity` groups."""
        return cls(
            order="weighted", priority_exponent=priority_exponent, capacity=capacity, seed=seed,
            max_times_sampled=max_times_sampled, samples_per_insert=samples_per_insert,
            min_size_to_sample=min_size_to_sample, error_buffer=error_buffer,
        )  # fmt: skip


def _check_replay(policy: GroupPolicy) -> None:
    """`InvalidInput` for settings of priorities, of repeats and of the rate that mean nothing together."""
    repeats, rate = policy.max_times_sampled != 1, policy.samples_per_insert
    if (repeats or policy.by_priority) and policy.serve not in ("ready", "window"):
        raise InvalidInput(f"groups that are served by {policy.serve!r} have no priorities and are used once")
    if repeats and policy.max_times_sampled is None and policy.capacity is None and policy.stale != "evict":
        raise InvalidInput("groups that are never used up need a capacity, or a window whose stale groups are evicted")
    if not 0.0 <= policy.priority_exponent <= MAX_EXPONENT:
        raise InvalidInput(f"priority_exponent {policy.priority_exponent}: expected a number from 0 to {MAX_EXPONENT}")
    if policy.max_times_sampled == 0 or policy.capacity == 0 or policy.min_size_to_sample == 0:
        raise InvalidInput("max_times_sampled, capacity and min_size_to_sample are 1 or more")
    if policy.capacity is not None and policy.capacity < policy.min_size_to_sample:
        raise InvalidInput(f"capacity {policy.capacity} is below min_size_to_sample {policy.min_size_to_sample}")
    if rate is None:
        if policy.error_buffer is not None:
            raise InvalidInput("error_buffer bounds what samples_per_insert allows: give both")
        return
    if policy.serve in ("window", "cohort") and policy.stale == "keep":
        raise InvalidInput("samples_per_insert and groups kept below the window: producers would wait for their use")
    if policy.gate is not None:
        raise InvalidInput("a policy has a gate by versions, or one by samples_per_insert")
    if not 0.0 < rate <= MAX_COUNT:
        raise InvalidInput(f"samples_per_insert {rate}: expected a number above 0")
    if policy.max_times_sampled is not None and rate > policy.max_times_sampled:
        raise InvalidInput(
            f"samples_per_insert {rate} is more than max_times_sampled {policy.max_times_sampled} ever allows"
        )
    if policy.error_buffer is not None and not max(1.0, rate) <= policy.error_buffer <= MAX_COUNT:
        raise InvalidInput(f"error_buffer {policy.error_buffer}: expected {max(1.0, rate):g} or more")


def _span(steps: object) -> int:
    try:
        found = operator.index(steps)  # type: ignore[arg-type]
    except TypeError:
        found = 0
    if found < 1:
        raise InvalidInput(f"max_span of a group policy is a number of steps, 1 or more; got {steps!r:.200}")
    return found


@cache  # made anew, they would be most of what a policy costs
def _kinds() -> dict[str, Any]:
    return get_type_hints(GroupPolicy)


def _check(policy: GroupPolicy) -> None:
    """`InvalidInput` unless every setting has a value of its kind."""
    for name, kind in _kinds().items():
        value = getattr(policy, name)
        try:
            msgspec.convert(value, kind)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise InvalidInput(f"{name} of a group policy cannot be {value!r}: {error}") from None
        if isinstance(value, int) and not 0 <= value < MAX_COUNT:
            raise InvalidInput(f"{name} of a group policy cannot be {value!r}")
