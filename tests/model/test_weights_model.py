"""Any order of calls: what is live is, bit for bit, one committed version, and `installed` names it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from weights import Net, Version, Weights, copy_of, delta, drawn, full, same

from transfer_queue.errors import (
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    Incomplete,
    NotOpen,
    StaleBase,
    StaleVersion,
    UpdateInProgress,
    WrongEpoch,
)
from transfer_queue.weights import Flip, InPlace, Receiver, State, Swap
from transfer_queue.weights.receive import stand_ins, targets
from transfer_queue.weights.receive.targets import Target

MODES: dict[str, Callable[[], Target]] = {
    "in place": lambda: InPlace(Net()),
    "swap": lambda: Swap(Net()),
    "flip": lambda: Flip(Net(), Net()),
}
EXPECTED = (
    DeadlineExceeded,
    DigestMismatch,
    Incomplete,
    NotOpen,
    StaleBase,
    StaleVersion,
    UpdateInProgress,
    WrongEpoch,
)
STEPS = st.integers(0, 3)


class AnyOrder(RuleBasedStateMachine):
    @initialize(mode=st.sampled_from(sorted(MODES)))
    def begin(self, mode: str) -> None:
        self.now = 0.0
        self.receiver = Receiver(MODES[mode](), clock=lambda: self.now)
        with self.receiver.reading() as live:
            self.live = copy_of(live.module)
        self.committed: tuple[str, int] | None = None
        self.opened: tuple[Version, Weights] | None = None
        self.states = [drawn(Net(), seed) for seed in range(4)]

    def attempt(self, call: Callable[[], Any]) -> bool:
        try:
            call()
        except EXPECTED:
            return False
        return True

    @rule(state=STEPS, version=st.integers(1, 6), epoch=st.sampled_from("ab"))
    def open_full(self, state: int, version: int, epoch: str) -> None:
        self.open(full(self.states[state], version, epoch), self.states[state])

    @rule(old=STEPS, new=STEPS, base=st.integers(0, 5), epoch=st.sampled_from("ab"), sparse=st.booleans())
    def open_delta(self, old: int, new: int, base: int, epoch: str, sparse: bool) -> None:
        before = self.states[old]
        after = {name: tensor.clone() for name, tensor in before.items()} if sparse else self.states[new]
        if sparse:
            after["first.weight"][new, new] += 1
        self.open(delta(before, after, base + 1, base, epoch), after)

    @rule(new=STEPS)
    def open_delta_on_what_is_live(self, new: int) -> None:
        if self.committed is not None:
            epoch, version = self.committed
            after = {name: tensor.clone() for name, tensor in self.live.items()}
            after["first.weight"][new, new] += 1
            self.open(delta(self.live, after, version + 1, version, epoch), after)

    def open(self, version: Version, result: Weights) -> None:
        if self.attempt(lambda: self.receiver.open(version.manifest, 10)):
            self.opened = (version, result)

    @rule(seed=st.randoms(), share=st.sampled_from([0.5, 1, 1]))
    def stage(self, seed: Any, share: float) -> None:
        if self.opened is not None:
            buckets = list(enumerate(self.opened[0].buckets)) * 2  # duplicates, in any order
            seed.shuffle(buckets)
            for index, data in buckets[: int(len(buckets) * share)]:
                self.attempt(lambda index=index, data=data: self.receiver.stage(index, data))

    @rule(at=st.integers(0, 10**6))
    def stage_damaged(self, at: int) -> None:
        if self.opened is not None and self.opened[0].manifest.tensors:
            spec = self.opened[0].manifest.tensors[at % len(self.opened[0].manifest.tensors)]
            bad = self.opened[0].buckets[spec.bucket].clone()
            bad[spec.offset + at % spec.stored.nbytes] ^= 1 + at % 255
            self.attempt(lambda: self.receiver.stage(spec.bucket, bad))

    @rule()
    def verify(self) -> None:
        self.attempt(self.receiver.verify)

    @rule()
    def commit(self) -> None:
        if self.attempt(self.receiver.commit):
            assert self.opened is not None
            manifest = self.opened[0].manifest
            self.live, self.committed = self.opened[1], (manifest.epoch, manifest.version)

    @rule()
    def go_on_to_the_end(self) -> None:
        if self.opened is not None:
            for index, data in enumerate(self.opened[0].buckets):
                self.attempt(lambda index=index, data=data: self.receiver.stage(index, data))
            self.verify()
            self.commit()

    @rule(call=st.integers(0, 4))
    def commit_fails(self, call: int) -> None:
        calls: list[object] = []

        def failing(good: Callable[..., None]) -> Callable[..., None]:
            def step(*args: Any) -> None:
                good(*args)
                calls.append(good)
                if len(calls) == call + 1:
                    raise OSError("full")

            return step

        with pytest.MonkeyPatch.context() as patch:
            for place, name in ((targets, "_put"), (stand_ins, "point"), (stand_ins.Exchange, "turn")):
                patch.setattr(place, name, failing(getattr(place, name)))
            try:
                self.commit()
            except CommitFailed:
                assert not self.receiver.installed().dirty

    @rule()
    def commit_while_a_reader_stays(self) -> None:
        entered, leave = threading.Event(), threading.Event()

        def read() -> None:
            with self.receiver.reading():
                entered.set()
                leave.wait(10)

        reader = threading.Thread(target=read)
        reader.start()
        entered.wait(10)
        try:
            if self.attempt(lambda: self.receiver.commit(timeout_s=0.001)):
                assert self.opened is not None
                manifest = self.opened[0].manifest
                self.live, self.committed = self.opened[1], (manifest.epoch, manifest.version)
        finally:
            leave.set()
            reader.join()

    @rule()
    def abort(self) -> None:
        self.receiver.abort("test")

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def one_committed_version_is_live(self) -> None:
        with self.receiver.reading() as live:
            assert same(copy_of(live.module), self.live)
            assert live.tag == self.receiver.installed()
        found = self.receiver.installed()
        assert (None if found.version is None else (found.epoch, found.version)) == self.committed
        assert not found.dirty
        if self.committed is not None:
            assert found.root == full(self.live, 1).manifest.root


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase


class Wide(torch.nn.Module):
    """Its output is the same number everywhere, and only then, when all weights have one value."""

    def __init__(self, num_layers: int = 6, width: int = 2048) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(width) for _ in range(num_layers))

    def forward(self) -> torch.Tensor:
        return torch.stack(
            [layer.detach().min() for layer in self.layers] + [layer.detach().max() for layer in self.layers]
        )


@pytest.mark.parametrize("mode", ["in place", "swap", "flip"])
def test_no_forward_pass_sees_two_versions(mode: str) -> None:
    made = {"in place": lambda: InPlace(Wide()), "swap": lambda: Swap(Wide()), "flip": lambda: Flip(Wide(), Wide())}
    receiver = Receiver(made[mode]())
    done = threading.Event()
    seen: list[set[int]] = [set(), set()]
    torn: list[Any] = []

    def forward(mine: set[int]) -> None:
        while not done.is_set():
            with receiver.reading() as live:
                values = set(live.module().tolist())
                if values != {float(live.tag.version or 0)}:
                    torn.append((values, live.tag))
                mine.add(live.tag.version or 0)

    readers = [threading.Thread(target=forward, args=(mine,)) for mine in seen]
    for reader in readers:
        reader.start()
    names = list(Wide().state_dict())
    try:
        for version in range(1, 151):
            sent = full({name: torch.full((2048,), float(version)) for name in names}, version, bucket_nbytes=20_000)
            for index in receiver.open(sent.manifest, 30):
                receiver.stage(index, sent.buckets[index])
            receiver.verify()
            receiver.commit()
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert not torn
    assert all(len(mine) > 1 for mine in seen)
    assert receiver.installed().version == 150
    assert receiver.state is State.INSTALLED


def test_buckets_from_many_threads() -> None:
    receiver = Receiver(InPlace(Net()))
    weights = drawn(Net(), 1)
    sent = full(weights, 1, bucket_nbytes=64)
    receiver.open(sent.manifest, 30)
    barrier = threading.Barrier(6)

    def stage(start: int) -> None:
        barrier.wait()
        for index in range(len(sent.buckets)):
            receiver.stage((index + start) % len(sent.buckets), sent.buckets[(index + start) % len(sent.buckets)])

    threads = [threading.Thread(target=stage, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    receiver.verify()
    receiver.commit()
    with receiver.reading() as live:
        assert same(copy_of(live.module), weights)
