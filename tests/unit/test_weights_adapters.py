"""LoRA adapters: numerics, labels, bases, removal, PEFT's folders; in one process."""

from __future__ import annotations

import copy
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import until
from safetensors.torch import load_file
from weights import ROOM_S, Net, Version, Weights, copy_of, drawn, full, install, lora, merged, same

from transfer_queue.errors import (
    BadManifest,
    CommitFailed,
    DeadlineExceeded,
    Incomplete,
    InvalidInput,
    NotSupported,
    ShapeMismatch,
    StaleBase,
    StaleVersion,
    UnknownTensor,
)
from transfer_queue.weights import Control, Flip, InPlace, Receiver, StateDictSource, Swap, Target
from transfer_queue.weights.receive.adapters import Lora, load, save
from transfer_queue.weights.transport.shm import ShmEngine, ShmTrainer

CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": ["first"]}
GIVEN = torch.arange(16.0).reshape(2, 8)
PREFIX = "base_model.model."


def adapter(weights: Weights, version: int, label: str = "math", config: Any = None, **more: Any) -> Version:
    meta = {"adapter_config": json.dumps(CONFIG if config is None else config)}
    return full(weights, version, kind="adapter", label=label, meta=meta, **more)


def removal(version: int, label: str = "math") -> Version:
    return full({}, version, kind="adapter", label=label)


def by_hand(weights: Weights, given: torch.Tensor = GIVEN) -> torch.Tensor:
    return torch.nn.functional.linear(given, weights["first.weight"], weights["first.bias"])


class Server:
    """A module that serves version 1 of `drawn`."""

    def __init__(self, kind: type[Target] = InPlace) -> None:
        self.modules = [Net(), Net()] if kind is Flip else [Net()]
        self.lora = Lora(*self.modules)
        self.receiver = Receiver(kind(*self.modules), adapter=self.lora)
        self.base = full(drawn(Net(), 1), 1)
        install(self.receiver, self.base)

    def answer(self, label: str = "") -> torch.Tensor:
        with self.receiver.reading() as live:
            if not label:
                return live.module.first(GIVEN)
            with self.lora.active(label, live.tag):
                return live.module.first(GIVEN)


@pytest.mark.parametrize("kind", [InPlace, Swap, Flip])
def test_an_adapter_gives_what_merging_it_by_hand_gives(kind: type[Target]) -> None:
    server = Server(kind)
    weights = drawn(Net(), 1)
    for version in (1, 2):
        install(server.receiver, adapter(lora(version), version))
        assert torch.equal(server.answer("math"), by_hand(merged(weights, lora(version), 2.0)))
        assert torch.equal(server.answer(), by_hand(weights))
    install(server.receiver, adapter(lora(3), 1, "code", {**CONFIG, "use_rslora": True, "lora_alpha": 0.5}))
    expected = by_hand(merged(weights, lora(3), 0.5 / math.sqrt(2)))
    assert torch.allclose(server.answer("code"), expected, rtol=1e-6)
    install(server.receiver, full(drawn(Net(), 5), 2))
    assert torch.equal(server.answer("math"), by_hand(merged(drawn(Net(), 5), lora(2), 2.0)))
    assert server.lora.labels == ["code", "math"]


def test_the_modules_names_weights_and_copies_stay_as_they_are() -> None:
    module = Net()
    module.load_state_dict(drawn(module, 1))
    before = copy_of(module)
    names = [name for name, _ in module.named_modules()]
    server = Lora(module)
    again = Lora(module)
    version = adapter(lora(1), 1).manifest
    server(server.prepare(lora(1), version), version)
    again(again.prepare(lora(2), version), version)
    assert same(copy_of(module), before)
    assert [name for name, _ in module.named_modules()] == names
    copied = copy.deepcopy(module)
    with server.active("math"):
        assert torch.equal(module.first(GIVEN), module.first(input=GIVEN))
        assert torch.equal(module.first(GIVEN), by_hand(merged(before, lora(1), 2.0)))
        assert torch.equal(copied.first(GIVEN), by_hand(before))
        with again.active("math"):
            both = merged(merged(before, lora(1), 2.0), lora(2), 2.0)
            assert torch.equal(module.first(GIVEN), by_hand(both))
    assert torch.equal(module.first(GIVEN), by_hand(before))


def test_a_layer_of_another_dtype_keeps_its_own() -> None:
    module = Net()
    one = Lora(module)
    halves = {"A": torch.ones(1, 8), "B": torch.ones(1, 1)}
    weights = {f"{PREFIX}second.lora_{half}.weight": tensor for half, tensor in halves.items()}
    version = adapter(weights, 1, config={"r": 1, "lora_alpha": 3, "target_modules": "sec.*"}).manifest
    one(one.prepare(weights, version), version)
    given = torch.ones(8, dtype=torch.bfloat16)
    plain = module.second(given)
    with one.active("math"):
        found = module.second(given)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, plain + 24)


def test_each_pass_has_one_version_of_the_adapter_it_chose() -> None:
    server = Server(Swap)
    labels, last = ["math", "code"], 30
    seeds = {
        (label, version): 100 * index + version for index, label in enumerate(labels) for version in range(last + 1)
    }
    answers = {key: by_hand(merged(drawn(Net(), 1), lora(seed), 2.0)) for key, seed in seeds.items()}
    for label in labels:
        install(server.receiver, adapter(lora(seeds[label, 0]), 0, label))
    wrong: list[Any] = []
    seen: set[tuple[str, int]] = set()
    done = threading.Event()

    def serve(label: str) -> None:
        while not done.is_set():
            with server.receiver.reading() as live, server.lora.active(label, live.tag):
                version = live.tag.adapters[label].version
                if not torch.equal(live.module.first(GIVEN), answers[label, version]):
                    wrong.append((label, version))
                seen.add((label, version))

    threads = [threading.Thread(target=serve, args=(label,)) for label in labels]
    for thread in threads:
        thread.start()
    try:
        for version in range(1, last + 1):
            for label in labels:
                install(server.receiver, adapter(lora(seeds[label, version]), version, label))
        until(lambda: seen >= {(label, last) for label in labels}, "a pass with the last versions")
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(seen) > len(labels)


A, B = f"{PREFIX}first.lora_A.weight", f"{PREFIX}first.lora_B.weight"
REFUSED: list[tuple[Weights, Any, type[Exception]]] = [
    ({A: torch.ones(2, 8)}, CONFIG, Incomplete),
    ({A: torch.ones(3, 8), B: torch.ones(8, 3)}, CONFIG, ShapeMismatch),
    ({A: torch.ones(2, 8), B: torch.ones(2, 8)}, CONFIG, ShapeMismatch),
    ({A: torch.ones(2, 8), B: torch.ones(8, 2).bfloat16()}, CONFIG, ShapeMismatch),
    ({A: torch.ones(2, 8).int(), B: torch.ones(8, 2).int()}, CONFIG, ShapeMismatch),
    ({**lora(1), f"{PREFIX}third.lora_A.weight": torch.ones(2, 8)}, {"r": 2}, UnknownTensor),
    ({**lora(1), "first.weight": torch.ones(8, 8)}, CONFIG, UnknownTensor),
    (lora(1), {"r": 2, "target_modules": ["irst"]}, UnknownTensor),
    (lora(1), {"r": 0}, InvalidInput),
    (lora(1), {"r": 2, "target_modules": "("}, InvalidInput),
    (lora(1), {}, InvalidInput),
    (lora(1), [], BadManifest),
    (lora(1), {**CONFIG, "use_dora": True}, NotSupported),
    (lora(1), {**CONFIG, "bias": "all"}, NotSupported),
    (lora(1), {**CONFIG, "peft_type": "IA3"}, NotSupported),
    (lora(1), {**CONFIG, "alpha_pattern": {"first": 3}}, NotSupported),
]


@pytest.mark.parametrize(("weights", "config", "error"), REFUSED)
def test_what_does_not_fit_is_refused_before_the_commit(weights: Weights, config: Any, error: type[Exception]) -> None:
    server = Server()
    install(server.receiver, adapter(lora(7), 1))
    bad = adapter(weights, 2, config=config)
    for index in server.receiver.open(bad.manifest, ROOM_S):
        server.receiver.stage(index, bad.buckets[index])
    with pytest.raises(error):
        server.receiver.verify()
    assert server.receiver.installed().adapters["math"].version == 1
    assert torch.equal(server.answer("math"), by_hand(merged(drawn(Net(), 1), lora(7), 2.0)))
    install(server.receiver, adapter(lora(8), 3))


def test_layers_whose_hooks_are_never_called_are_refused() -> None:
    attention = torch.nn.MultiheadAttention(8, 2)
    one = Lora(attention)
    weights = {name.replace("first", "out_proj"): tensor for name, tensor in lora(1).items()}
    with pytest.raises(NotSupported, match="out_proj"):
        one.prepare(weights, adapter(weights, 1, config={"r": 2}).manifest)
    module = Net()
    two = Lora(module)
    module.first = torch.nn.Linear(8, 8)
    with pytest.raises(NotSupported, match="from the start"):
        two.prepare(lora(1), adapter(lora(1), 1).manifest)
    twice = torch.nn.ModuleDict({"first": torch.nn.Linear(8, 8)})
    twice["other"] = twice["first"]
    both = {**lora(1), **{name.replace("first", "other"): tensor for name, tensor in lora(2).items()}}
    with pytest.raises(NotSupported, match="another name"):
        Lora(twice).prepare(both, adapter(both, 1, config={"r": 2}).manifest)


def test_a_failed_commit_keeps_the_old_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    install(server.receiver, adapter(lora(1), 1))
    old = server.answer("math")
    second = adapter(lora(2), 2)
    with server.receiver.reading():
        started = threading.Thread(target=lambda: failed.append(_failure(server, second)))
        failed: list[BaseException] = []
        started.start()
        started.join()
    assert isinstance(failed[0], DeadlineExceeded)
    assert torch.equal(server.answer("math"), old)
    server.receiver.abort("no time left")

    def broken(self: Any, prepared: Any, manifest: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Lora, "__call__", broken)
        with pytest.raises(CommitFailed, match="no memory"):
            install(server.receiver, second)
    info = server.receiver.installed()
    assert (info.adapters["math"].version, info.dirty) == (1, False)
    assert torch.equal(server.answer("math"), old)
    install(server.receiver, second)
    assert torch.equal(server.answer("math"), by_hand(merged(drawn(Net(), 1), lora(2), 2.0)))


def _failure(server: Server, version: Version) -> BaseException:
    for index in server.receiver.open(version.manifest, ROOM_S):
        server.receiver.stage(index, version.buckets[index])
    server.receiver.verify()
    with pytest.raises(DeadlineExceeded) as caught:
        server.receiver.commit(0.05)
    return caught.value


def test_an_adapter_is_only_added_to_the_weights_it_is_for() -> None:
    server = Server()
    base_root = server.base.manifest.root
    with pytest.raises(StaleBase):
        server.receiver.open(adapter(lora(1), 1, base_root="0" * 32).manifest, ROOM_S)
    install(server.receiver, adapter(lora(1), 1, base_root=base_root))
    install(server.receiver, adapter(lora(2), 1, "code"))
    assert torch.equal(server.answer("math"), by_hand(merged(drawn(Net(), 1), lora(1), 2.0)))
    with pytest.raises(InvalidInput, match=r"live\.tag"), server.lora.active("math"):
        pass
    install(server.receiver, full(drawn(Net(), 2), 2))
    assert server.receiver.installed().outdated == ("math",)
    with pytest.raises(StaleBase, match="math"):
        server.answer("math")
    assert torch.equal(server.answer("code"), by_hand(merged(drawn(Net(), 2), lora(2), 2.0)))
    install(server.receiver, adapter(lora(3), 2, base_root=full(drawn(Net(), 2), 2).manifest.root))
    assert server.receiver.installed().outdated == ()
    assert torch.equal(server.answer("math"), by_hand(merged(drawn(Net(), 2), lora(3), 2.0)))


def test_a_removed_adapter_comes_back_as_a_newer_version_only() -> None:
    server = Server()
    install(server.receiver, adapter(lora(1), 1))
    install(server.receiver, adapter(lora(2), 1, "code"))
    install(server.receiver, removal(2))
    assert set(server.receiver.installed().adapters) == {"code"}
    assert server.lora.labels == ["code"]
    with pytest.raises(InvalidInput, match="no adapter 'math'"):
        server.answer("math")
    with pytest.raises(StaleVersion):
        server.receiver.open(adapter(lora(1), 1).manifest, ROOM_S)
    install(server.receiver, removal(2))
    install(server.receiver, removal(1, "unheard_of"))
    install(server.receiver, adapter(lora(1), 3))
    assert torch.equal(server.answer("math"), by_hand(merged(drawn(Net(), 1), lora(1), 2.0)))
    server.receiver.scramble(ROOM_S)
    install(server.receiver, adapter(lora(2), 4))
    info = server.receiver.installed()
    assert (info.adapters["math"].version, info.dirty) == (4, True)
    install(server.receiver, full(drawn(Net(), 2), 2))
    assert not server.receiver.installed().dirty


def test_an_adapter_gives_the_weights_no_other_label() -> None:
    module = Net()
    lora_of = Lora(module)
    receiver = Receiver(Swap(module), adapter=lora_of)
    control = Control(ShmEngine(receiver), receiver)
    trainer = ShmTrainer.trainer_init({}, client=control, source=StateDictSource(drawn(module, 1)))
    trainer.send_weights(7, deadline_s=ROOM_S)
    trainer.send_adapter("math", StateDictSource(lora(1)), CONFIG, version=3, deadline_s=ROOM_S)
    with pytest.raises(StaleVersion, match="after 3"):
        trainer.send_adapter("math", StateDictSource(lora(1)), CONFIG, version=3, deadline_s=ROOM_S)
    assert control.get_weight_version() == "7"
    assert (lora_of.labels, trainer.version) == (["math"], 7)
    with pytest.raises(UnknownTensor):
        trainer.send_adapter("math", StateDictSource({"a": torch.ones(1)}), CONFIG, deadline_s=ROOM_S)
    refused: list[tuple[str, Weights, Any]] = [("", lora(1), CONFIG), ("x" * 99, lora(1), CONFIG), ("x", {}, CONFIG)]
    for label, weights, config in [*refused, ("x", lora(1), {"r": {1}})]:
        with pytest.raises(InvalidInput):
            trainer.send_adapter(label, StateDictSource(weights), config, deadline_s=ROOM_S)
    assert trainer.remove_adapter("math", deadline_s=ROOM_S).version == 5
    assert (lora_of.labels, control.get_weight_version()) == ([], "7")
    control.shutdown_weight_transfer_engine()
    trainer.shutdown()


def test_folders_are_those_of_peft(tmp_path: Path) -> None:
    config = {**CONFIG, "lora_dropout": 0.05}
    save(tmp_path / "one", StateDictSource(lora(1)), config)
    assert same(load_file(tmp_path / "one" / "adapter_model.safetensors"), lora(1))
    source, found = load(tmp_path / "one")
    assert same(dict(source.tensors()), lora(1))
    assert found == {**config, "peft_type": "LORA"}
    (tmp_path / "one" / "adapter_config.json").write_text("[]")
    for folder in ("one", "none"):
        with pytest.raises(InvalidInput, match=r"adapter_config\.json"):
            load(tmp_path / folder)


def test_a_server_may_have_nothing_to_prepare() -> None:
    taken: list[int] = []

    class Sink:
        def prepare(self, tensors: Any, manifest: Any) -> None:
            """It only looks."""

        def __call__(self, prepared: None, manifest: Any) -> None:
            taken.append(manifest.version)

    receiver = Receiver(Swap(Net()), adapter=Sink())
    install(receiver, adapter(lora(1), 1))
    assert taken == [1]
