"""Receivers that give each other buckets, in any order of events, with some that die, freeze, or give damage."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import InvalidInput, VersionGone
from transfer_queue.weights.transport.protocol import Came
from transfer_queue.weights.transport.tracker import GRACE_S, PEER_UPLOADS, Assignment, Swarm

STALL_S = 10.0
MAX_FAULTS = 12  # of a run
Stream = tuple[str, int]


class Run:
    """Receivers with two streams each, until all that live have what they want. The clock goes on when nobody can."""

    def __init__(self, seed: int, wants: list[set[int]], holders: list[int], uploads: int) -> None:
        self.chance = random.Random(seed)
        self.holders, self.uploads = holders, uploads
        self.swarm = Swarm([self.chance.randrange(1, 4) for _ in holders], holders, uploads)
        self.names = [f"tcp:h:{number}" for number in range(len(wants))]
        self.lacks = dict(zip(self.names, map(set, wants), strict=True))
        self.has: dict[str, set[int]] = {name: set() for name in self.names}
        self.idle: list[Stream] = [(name, stream) for name in self.names for stream in (0, 1)]
        self.going: dict[Stream, tuple[Assignment, float]] = {}
        self.frozen: set[str] = set()
        self.sent: Counter[int] = Counter()
        self.now, self.faults = 0.0, 0
        for name in self.names:
            self.swarm.join(name, wants[self.names.index(name)], STALL_S)

    def step(self) -> None:
        asking = [one for one in self.idle if one[0] not in self.frozen]
        self.chance.shuffle(asking)
        if not any(self.ask(one) for one in asking) and not self.finish_one():
            late = self.swarm.next_end()
            assert late is not None, "everybody waits, and nothing is under way"
            self.now = late - self.chance.choice([0.0, GRACE_S / 2])  # with those who say so themselves, or without
            self.swarm.expire(self.now)
        self.check()

    def ask(self, stream: Stream) -> bool:
        self.swarm.hear(stream[0])
        found = self.swarm.pick(stream, stream[0], self.now)
        if found is None:
            return False
        self.idle.remove(stream)
        if not found.is_done:
            assert found.bucket in self.lacks[stream[0]]
            assert not found.peer or found.bucket in self.has.get(found.peer, set())
            self.going[stream] = found, self.now + STALL_S
            self.sent[found.bucket] += not found.peer
        return True

    def finish_one(self) -> bool:
        able = [
            (stream, found)
            for stream, (found, late) in self.going.items()
            if stream[0] not in self.frozen and (found.peer not in self.frozen or self.now >= late)
        ]
        if not able:
            return False
        stream, found = self.chance.choice(able)
        came: Came = "lost" if found.peer in self.frozen or found.peer not in ("", *self.has) else "staged"
        if came == "staged" and self.faults < MAX_FAULTS and self.chance.random() < 0.2:
            self.faults += 1
            came = self.chance.choice(["lost", "damaged"])
        del self.going[stream]
        self.idle.append(stream)
        self.swarm.settle(stream, came)
        if came == "staged":
            self.lacks[stream[0]].discard(found.bucket)
            self.has[stream[0]].add(found.bucket)
        return True

    def lose(self, name: str, kind: str) -> None:
        if kind == "frozen":
            self.frozen.add(name)
            return
        self.swarm.leave(name)
        self.idle = [one for one in self.idle if one[0] != name]
        for stream in [one for one in self.going if one[0] == name]:
            del self.going[stream]
        del self.lacks[name], self.has[name]
        self.names.remove(name)

    def check(self) -> None:
        under_way = list(self.swarm._under_way.values())
        ranks = Counter(self.holders[one.bucket] for one in under_way if not one.peer)
        assert all(num <= self.uploads for num in ranks.values())
        assert all(num <= PEER_UPLOADS for num in Counter(one.peer for one in under_way if one.peer).values())
        assert len({(one.taker, one.bucket) for one in under_way}) == len(under_way), "a bucket comes to somebody twice"

    def is_over(self) -> bool:
        return not any(lacks for name, lacks in self.lacks.items() if name not in self.frozen)


@given(
    seed=st.integers(0, 2**32),
    num=st.integers(1, 6),
    num_buckets=st.integers(1, 12),
    num_ranks=st.integers(1, 3),
    uploads=st.integers(1, 4),
    whole=st.booleans(),
    losses=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["dead", "frozen"])), max_size=3),
)
def test_everybody_who_lives_is_given_everything(
    seed: int,
    num: int,
    num_buckets: int,
    num_ranks: int,
    uploads: int,
    whole: bool,
    losses: list[tuple[int, str]],
) -> None:
    chance = random.Random(seed)
    holders = [chance.randrange(num_ranks) for _ in range(num_buckets)]
    wants = [{one for one in range(num_buckets) if whole or chance.random() < 0.6} for _ in range(num)]
    run = Run(seed, wants, holders, uploads)
    when = dict(losses)
    for step in range(2000):
        if run.is_over():
            break
        if step in when and run.names:
            run.lose(chance.choice(run.names), when[step])
            continue
        run.step()
    assert run.is_over()


def over_equal_links(num: int, sizes: list[int]) -> tuple[float, float]:
    """How long it takes and what the rank sends, in models: every host has a link that carries one model in 1 s each
    way, and what goes over a link shares it."""
    swarm = Swarm(sizes, [0] * len(sizes))
    names = [f"tcp:h:{number}" for number in range(num)]
    for name in names:
        swarm.join(name, range(len(sizes)), 1e9)
    idle: list[Stream] = [(name, stream) for stream in (0, 1) for name in names]
    left: dict[Stream, float] = {}
    ends: dict[Stream, tuple[tuple[str, str], tuple[str, str]]] = {}
    now, sent = 0.0, 0
    while True:
        for stream in list(idle):
            found = swarm.pick(stream, stream[0], now)
            if found is not None:
                idle.remove(stream)
            if found is not None and not found.is_done:
                left[stream], ends[stream] = sizes[found.bucket], (("up", found.peer), ("down", stream[0]))
                sent += 0 if found.peer else sizes[found.bucket]
        if not left:
            return now / sum(sizes), sent / sum(sizes)
        speeds = shared(ends)
        step = min(left[stream] / speeds[stream] for stream in left)
        now += step
        for stream in list(left):
            left[stream] -= speeds[stream] * step
            if left[stream] < 1e-6:
                del left[stream], ends[stream]
                swarm.settle(stream, "staged")
                idle.append(stream)


def shared(ends: dict[Stream, tuple[tuple[str, str], tuple[str, str]]]) -> dict[Stream, float]:
    """The speed of each transfer between two ends: fair shares, link by link, the fullest first."""
    links: dict[tuple[str, str], set[Stream]] = {}
    for stream, both in ends.items():
        for link in both:
            links.setdefault(link, set()).add(stream)
    room = dict.fromkeys(links, 1.0)
    found: dict[Stream, float] = {}
    while len(found) < len(ends):
        waiting = {link: streams - found.keys() for link, streams in links.items() if streams - found.keys()}
        fullest = min(waiting, key=lambda link: room[link] / len(waiting[link]))
        share = room[fullest] / len(waiting[fullest])
        for stream in waiting[fullest]:
            found[stream] = share
            for link in ends[stream]:
                room[link] -= share
    return found


@pytest.mark.parametrize(("sizes", "most"), [([1] * 64, 1.15), ([4, 4, *[1] * 56], 1.25)])
def test_eight_receivers_take_little_longer_than_one_over_equal_links(sizes: list[int], most: float) -> None:
    assert over_equal_links(1, sizes)[0] == pytest.approx(1.0)
    took, sent = over_equal_links(8, sizes)
    assert took < most
    assert sent < 1.1


@pytest.mark.parametrize("num", [2, 8, 32])
def test_a_rank_sends_each_bucket_about_once(num: int) -> None:
    run = Run(num, [set(range(64))] * num, [0] * 64, 4)
    run.faults = MAX_FAULTS
    while not run.is_over():
        run.step()
    assert 64 <= run.sent.total() <= 96


def test_one_receiver_alone_is_given_as_much_at_once_as_it_asks_for() -> None:
    swarm = Swarm([1] * 4, [0] * 4)
    swarm.join("tcp:a:1", range(4), STALL_S)
    assert [swarm.pick(stream, "tcp:a:1", 0.0) for stream in (0, 1)] == [Assignment(0), Assignment(1)]


def test_each_receiver_is_given_another_bucket_one_at_a_time() -> None:
    swarm = Swarm([1] * 8, [0] * 8)
    for name in ("tcp:a:1", "tcp:b:1"):
        swarm.join(name, range(8), STALL_S)
    assert swarm.pick(0, "tcp:a:1", 0.0) == Assignment(0)
    assert swarm.pick(1, "tcp:a:1", 0.0) is None
    assert swarm.pick(2, "tcp:b:1", 0.0) == Assignment(1)


def test_the_largest_bucket_goes_first() -> None:
    swarm = Swarm([1, 3, 2], [0] * 3, uploads=3)
    swarm.join("tcp:a:1", range(3), STALL_S)
    assert [swarm.pick(stream, "tcp:a:1", 0.0) for stream in range(3)] == [Assignment(1), Assignment(2), Assignment(0)]


def settled(swarm: Swarm, name: str, bucket: int, came: Came = "staged") -> None:
    swarm._begin("s", name, swarm._takers[name], Assignment(bucket), 0.0)
    swarm.settle("s", came)


def test_a_giver_that_was_lost_is_asked_once_it_asks_itself() -> None:
    swarm = Swarm([1], [0], uploads=1)
    for name in ("tcp:a:1", "tcp:b:1", "tcp:c:1"):
        swarm.join(name, [0], STALL_S)
    settled(swarm, "tcp:a:1", 0)
    assert swarm.pick(0, "tcp:b:1", 0.0) == Assignment(0, "tcp:a:1")
    swarm.settle(0, "lost")
    assert swarm.pick(0, "tcp:b:1", 0.0) == Assignment(0), "the rank has it, too"
    assert swarm.pick(1, "tcp:c:1", 0.0) is None
    swarm.hear("tcp:a:1")
    assert swarm.pick(1, "tcp:c:1", 0.0) == Assignment(0, "tcp:a:1")


def test_a_damaged_bucket_is_not_given_again_and_three_leave_the_giver_out() -> None:
    swarm = Swarm([1] * 4, [0] * 4)
    for name in ("tcp:a:1", "tcp:b:1"):
        swarm.join(name, range(4), STALL_S)
    for bucket in range(4):
        settled(swarm, "tcp:a:1", bucket)
    for bucket in range(3):
        assert swarm.pick(0, "tcp:b:1", 0.0) == Assignment(bucket, "tcp:a:1")
        swarm.settle(0, "damaged")
        assert swarm.pick(0, "tcp:b:1", 0.0) == Assignment(bucket)
        swarm.settle(0, "staged")
    assert swarm.pick(0, "tcp:b:1", 0.0) == Assignment(3)


def test_a_frozen_receiver_keeps_nobody_from_a_bucket_for_longer_than_its_stall() -> None:
    swarm = Swarm([1], [0], uploads=1)
    for name in ("tcp:a:1", "tcp:b:1"):
        swarm.join(name, [0], STALL_S)
    assert swarm.pick(0, "tcp:a:1", 0.0) == Assignment(0)
    assert swarm.pick(1, "tcp:b:1", 0.0) is None
    late = swarm.next_end()
    assert late is not None
    assert STALL_S < late < STALL_S + 2
    swarm.expire(late)
    assert swarm.pick(1, "tcp:b:1", late) == Assignment(0)


def test_who_has_not_joined_and_what_is_no_bucket_is_refused() -> None:
    swarm = Swarm([1], [0])
    with pytest.raises(VersionGone):
        swarm.hear("tcp:a:1")
    with pytest.raises(InvalidInput):
        swarm.join("tcp:a:1", [1], STALL_S)
    assert swarm.next_end() is None
