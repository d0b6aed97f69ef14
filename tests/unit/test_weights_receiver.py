"""The receiver's states: every order of calls, deadlines, epochs, bases, adapters, damaged and lent bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from weights import ROOM_S, Net, copy_of, delta, drawn, full, install, receiver_of, same

from transfer_queue.errors import (
    BadManifest,
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    Incomplete,
    InvalidInput,
    NotOpen,
    StaleBase,
    StaleVersion,
    UpdateInProgress,
    WrongEpoch,
)
from transfer_queue.weights import InPlace, Receiver, State, Swap
from transfer_queue.weights.receive.receiver import AdapterInfo, VersionInfo


@pytest.fixture
def module() -> Net:
    return Net()


@pytest.fixture
def receiver(module: Net) -> Receiver:
    return receiver_of(module)


WEIGHTS = [drawn(Net(), seed) for seed in range(5)]


def test_the_states_in_order(module: Net, receiver: Receiver) -> None:
    version = full(WEIGHTS[1], 1, label="first")
    before = copy_of(module)
    assert (receiver.state, receiver.installed()) == (State.IDLE, VersionInfo())
    wanted = receiver.open(version.manifest, ROOM_S)
    assert wanted == list(range(len(version.buckets)))
    assert len(wanted) > 2
    for index in reversed(wanted):
        assert receiver.state is State.OPEN
        receiver.stage(index, version.buckets[index])
    assert receiver.state is State.STAGED
    assert receiver.verify() == (1, version.manifest.root, 5, version.manifest.nbytes)
    assert receiver.state is State.READY
    assert same(copy_of(module), before)
    found = receiver.commit()
    assert (found.version, found.root) == (1, version.manifest.root)
    assert found.pause_s > 0
    assert receiver.state is State.INSTALLED
    assert receiver.installed() == VersionInfo(1, "e", version.manifest.root, "first")
    assert same(copy_of(module), WEIGHTS[1])


def test_steps_out_of_order_are_refused(receiver: Receiver) -> None:
    version = full(WEIGHTS[1], 1)
    for step in (lambda: receiver.stage(0, version.buckets[0]), receiver.verify, receiver.commit):
        with pytest.raises(NotOpen):
            step()
    receiver.open(version.manifest, ROOM_S)
    with pytest.raises(Incomplete, match="buckets are missing"):
        receiver.verify()
    with pytest.raises(NotOpen, match="not verified"):
        receiver.commit()
    with pytest.raises(InvalidInput):
        receiver.stage(len(version.buckets), version.buckets[0])
    with pytest.raises(UpdateInProgress, match="version 1 is open"):
        receiver.open(full(WEIGHTS[2], 2).manifest, ROOM_S)


def test_damaged_bytes_are_refused_and_duplicates_ignored(module: Net, receiver: Receiver) -> None:
    version = full(WEIGHTS[1], 1)
    receiver.open(version.manifest, ROOM_S)
    for spec in version.manifest.tensors:
        for at in (spec.offset, spec.offset + spec.nbytes - 1):
            bad = version.buckets[spec.bucket].clone()
            bad[at] ^= 1
            with pytest.raises(DigestMismatch, match=spec.name):
                receiver.stage(spec.bucket, bad)
    with pytest.raises(DigestMismatch, match="bytes instead"):
        receiver.stage(0, version.buckets[0][:-1])
    receiver.stage(0, version.buckets[0].numpy().tobytes())
    receiver.stage(0, b"whatever: it is here already")
    assert receiver.open(version.manifest, ROOM_S) == list(range(1, len(version.buckets)))  # goes on where it was
    install(receiver, version)
    assert same(copy_of(module), WEIGHTS[1])


def test_what_is_staged_is_a_copy_unless_lent(module: Net) -> None:
    receiver = Receiver(Swap(module))
    for version, lend in ((1, False), (2, True)):
        sent = full(WEIGHTS[version], version)
        for index in receiver.open(sent.manifest, ROOM_S):
            receiver.stage(index, sent.buckets[index], lend=lend)
        receiver.verify()
        receiver.commit()
        memory = {one.untyped_storage().data_ptr() for one in sent.buckets}
        assert ({one.untyped_storage().data_ptr() for one in module.state_dict().values()} == memory) == lend


@pytest.mark.parametrize("num_steps", range(4))
def test_abort_at_every_step(module: Net, receiver: Receiver, num_steps: int) -> None:
    install(receiver, full(WEIGHTS[1], 1))
    version = full(WEIGHTS[2], 2)
    steps: list[Any] = [
        lambda: receiver.open(version.manifest, ROOM_S),
        lambda: [receiver.stage(index, one) for index, one in enumerate(version.buckets)],
        receiver.verify,
    ]
    for step in steps[:num_steps]:
        step()
    receiver.abort("test")
    assert receiver.state is State.INSTALLED
    assert same(copy_of(module), WEIGHTS[1])
    with pytest.raises(NotOpen):
        receiver.commit()
    install(receiver, version)
    assert same(copy_of(module), WEIGHTS[2])


def test_the_deadline_aborts(module: Net) -> None:
    now = [0.0]
    receiver = receiver_of(module, clock=lambda: now[0])
    install(receiver, full(WEIGHTS[1], 1))
    version = full(WEIGHTS[2], 2)
    for late in ("stage", "verify", "commit", "open"):
        for index in receiver.open(version.manifest, 5):
            receiver.stage(index, version.buckets[index])
        if late == "commit":
            receiver.verify()
        now[0] += 5
        if late == "open":
            assert receiver.open(full(WEIGHTS[3], 3).manifest, 5) == list(range(len(version.buckets)))
            continue
        with pytest.raises(DeadlineExceeded, match="aborted"):
            getattr(receiver, late)(*([0, version.buckets[0]] if late == "stage" else []))
        assert receiver.state is State.INSTALLED
    assert same(copy_of(module), WEIGHTS[1])


def test_versions_rise_and_the_same_again_does_nothing(module: Net, receiver: Receiver) -> None:
    install(receiver, full(WEIGHTS[1], 5))
    for version in (5, 4):
        with pytest.raises(StaleVersion):
            receiver.open(full(WEIGHTS[2], version).manifest, ROOM_S)
    address = module.first.weight.data_ptr()
    again = full(WEIGHTS[1], 5)
    assert receiver.open(again.manifest, ROOM_S) == []
    assert receiver.state is State.READY
    receiver.stage(0, again.buckets[0])
    receiver.verify()
    assert receiver.commit() == (5, again.manifest.root, 0, 0)
    assert module.first.weight.data_ptr() == address
    install(receiver, full(WEIGHTS[1], 6))
    assert receiver.installed().version == 6


def test_an_epoch_that_was_followed_is_over(receiver: Receiver) -> None:
    install(receiver, full(WEIGHTS[1], 5, "monday"))
    with pytest.raises(WrongEpoch, match="begin with a full"):
        receiver.open(delta(WEIGHTS[2], WEIGHTS[3], 9, 5, "tuesday").manifest, ROOM_S)
    receiver.open(full(WEIGHTS[2], 1, "tuesday").manifest, ROOM_S)
    receiver.abort("only a commit ends an epoch")
    install(receiver, full(WEIGHTS[2], 6, "monday"))
    install(receiver, full(WEIGHTS[3], 1, "tuesday"))
    with pytest.raises(WrongEpoch, match="over"):
        receiver.open(full(WEIGHTS[4], 7, "monday").manifest, ROOM_S)


def test_a_new_epoch_may_begin_with_a_delta_on_what_is_installed(module: Net, receiver: Receiver) -> None:
    install(receiver, full(WEIGHTS[1], 5, "monday"))
    install(receiver, delta(WEIGHTS[1], WEIGHTS[2], 3, 2, "tuesday"))
    assert same(copy_of(module), WEIGHTS[2])
    assert (receiver.installed().epoch, receiver.installed().version) == ("tuesday", 3)


def test_a_delta_needs_its_base(module: Net, receiver: Receiver) -> None:
    update = delta(WEIGHTS[2], WEIGHTS[3], 3, 2)
    with pytest.raises(StaleBase):
        receiver.open(update.manifest, ROOM_S)
    install(receiver, full(WEIGHTS[1], 1))
    with pytest.raises(StaleBase, match="delta on 2, installed is 1"):
        receiver.open(update.manifest, ROOM_S)
    install(receiver, full(WEIGHTS[2], 2))
    with pytest.raises(StaleBase):
        receiver.open(delta(WEIGHTS[2], WEIGHTS[3], 3, 1).manifest, ROOM_S)
    install(receiver, update)
    assert same(copy_of(module), WEIGHTS[3])


def sparse() -> dict[str, torch.Tensor]:
    found = {name: tensor.clone() for name, tensor in WEIGHTS[1].items()}
    found["first.weight"][2, 3] += 1
    return found


def test_weights_that_somebody_else_changed_are_no_base(module: Net, receiver: Receiver) -> None:
    install(receiver, full(WEIGHTS[1], 1))
    update = delta(WEIGHTS[1], sparse(), 2, 1)
    with torch.no_grad():
        module.first.weight[5, 5] += 1
    mine = copy_of(module)
    with pytest.raises(StaleBase, match=r"first\.weight"):
        install(receiver, update)
    assert receiver.state is State.INSTALLED
    assert same(copy_of(module), mine)
    install(receiver, full(sparse(), 2))


def test_a_target_that_casts_takes_no_deltas(module: Net) -> None:
    receiver = Receiver(InPlace(module, cast=True))
    install(receiver, full(WEIGHTS[1], 1))
    with pytest.raises(StaleBase, match="casts"):
        receiver.open(delta(WEIGHTS[1], sparse(), 2, 1).manifest, ROOM_S)


def test_a_delta_that_does_not_lead_to_its_root_is_refused(receiver: Receiver) -> None:
    from msgspec.structs import replace

    install(receiver, full(WEIGHTS[1], 1))
    good = delta(WEIGHTS[1], sparse(), 2, 1).manifest
    with pytest.raises(BadManifest, match="root"):
        receiver.open(replace(good, root="0" * 32), ROOM_S)
    renamed = replace(good, tensors=(replace(good.tensors[0], name="other"),))
    with pytest.raises(BadManifest, match="other"):
        receiver.open(renamed, ROOM_S)


def test_adapters_are_versions_of_their_own(module: Net) -> None:
    taken: list[tuple[str, dict[str, torch.Tensor]]] = []
    receiver = receiver_of(module, adapter=lambda tensors, manifest: taken.append((manifest.label, tensors)))
    lora = {"a": torch.ones(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16)}
    install(receiver, full(lora, 1, kind="adapter", label="math"))
    weights = full(WEIGHTS[1], 1)
    install(receiver, weights)
    more = {"a": torch.full((2, 3), 2.0)}
    good = full(more, 2, kind="adapter", label="math", base_root=weights.manifest.root)
    install(receiver, good)
    assert [label for label, _ in taken] == ["math", "math"]
    assert same(taken[0][1], lora)
    assert same(taken[1][1], more)
    found = receiver.installed()
    assert (found.version, found.root) == (1, weights.manifest.root)
    assert found.adapters == {"math": AdapterInfo(2, "e", good.manifest.root, weights.manifest.root)}
    with pytest.raises(StaleVersion):
        receiver.open(full(lora, 2, kind="adapter", label="math").manifest, ROOM_S)
    with pytest.raises(StaleBase):
        receiver.open(full(lora, 3, kind="adapter", label="math", base_root="0" * 32).manifest, ROOM_S)
    install(receiver, full(lora, 1, kind="adapter", label="code"))
    install(receiver, full(WEIGHTS[2], 2))
    assert set(receiver.installed().adapters) == {"math", "code"}


def test_an_adapter_that_is_not_taken_leaves_the_one_before(module: Net) -> None:
    def refuse(tensors: dict[str, torch.Tensor], _: Any) -> None:
        if "bad" in tensors:
            raise KeyError("bad")

    receiver = receiver_of(module, adapter=refuse)
    install(receiver, full({"good": torch.ones(1)}, 1, kind="adapter", label="x"))
    with pytest.raises(CommitFailed, match="bad"):
        install(receiver, full({"bad": torch.ones(1)}, 2, kind="adapter", label="x"))
    assert receiver.installed().adapters["x"].version == 1
    assert not receiver.installed().dirty
    with pytest.raises(InvalidInput, match="no adapters"):
        receiver_of(module).open(full({"good": torch.ones(1)}, 1, kind="adapter").manifest, ROOM_S)
