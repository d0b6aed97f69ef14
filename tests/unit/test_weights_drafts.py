"""Versions of a model and its draft, and of a draft alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from weights import Direct, Net, copy_of

from transfer_queue.errors import InvalidInput
from transfer_queue.weights import ModuleSource, Receiver, StateDictSource, Swap, digests, plan, seal, with_draft
from transfer_queue.weights.transport import registry
from transfer_queue.weights.version.drafts import DRAFT
from transfer_queue.weights.version.manifest import Manifest
from transfer_queue.weights.version.sources import parts_of, shards_in


class Taking(Direct):
    """A server of another kind: it takes drafts by their label."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.draft: dict[str, torch.Tensor] = {}
        self.engine = registry.engine("shm")(Receiver(Swap(module), adapter=self))

    def __call__(self, tensors: dict[str, torch.Tensor], manifest: Manifest) -> None:
        assert manifest.label == DRAFT
        self.draft = {name: one.clone() for name, one in tensors.items()}


class Both(torch.nn.Module):
    """Has parameters with the names that a version of both has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.register_parameter(f"{DRAFT}weight", torch.nn.Parameter(torch.zeros(3)))


def test_a_source_of_both_gives_the_draft_after_the_model_under_names_of_its_own() -> None:
    head = torch.ones(2, 2)
    draft = StateDictSource({"fc": torch.zeros(3), "head": head, "tied": head})
    source: Any = with_draft(StateDictSource({"w": torch.ones(2)}), draft)
    names = ["w", f"{DRAFT}fc", f"{DRAFT}head"]
    assert [one.name for one in source.specs()] == [name for name, _ in source.tensors()] == names
    assert [one.name for one in shards_in(source)] == [name for name, _ in parts_of(source)] == names
    assert source.aliases() == {f"{DRAFT}tied": f"{DRAFT}head"}
    assert not source.is_sharded


def test_a_draft_alone_has_versions_of_its_own_and_leaves_the_weights() -> None:
    module = Net()
    server = Taking(module)
    trainer = registry.trainer("shm").trainer_init({}, client=server, source=ModuleSource(Net()))
    assert trainer.send_weights(deadline_s=20).version == 1
    before = copy_of(module)
    for version in (1, 2):
        draft = StateDictSource({"fc": torch.full((3,), float(version))})
        assert trainer.send_draft(draft, deadline_s=20).version == version
        assert server.draft["fc"].tolist() == [version] * 3
    installed = server.engine.receiver.installed()
    assert (installed.version, installed.adapters[DRAFT].version) == (1, 2)
    assert all(torch.equal(one, before[name]) for name, one in copy_of(module).items())
    assert [info["label"] for info in trainer.catch_up_infos(20)] == ["", DRAFT]  # for who comes late
    trainer.shutdown()
    server.engine.shutdown()


def test_a_version_of_both_takes_the_place_of_a_draft_that_came_alone() -> None:
    server = Taking(Both())
    source = StateDictSource({"weight": torch.ones(2)})
    trainer = registry.trainer("shm").trainer_init({}, client=server, source=source)
    trainer.send_draft(StateDictSource({"weight": torch.ones(3)}), deadline_s=20)
    trainer.shutdown()
    both = with_draft(source, StateDictSource({"weight": torch.ones(3)}))
    trainer = registry.trainer("shm").trainer_init({}, client=server, source=both)
    assert DRAFT in server.engine.receiver.installed().adapters
    trainer.send_weights(deadline_s=20)
    assert server.engine.receiver.installed().adapters == {}
    with pytest.raises(InvalidInput, match="send_weights brings both"):
        trainer.send_draft(StateDictSource({"weight": torch.ones(3)}), deadline_s=20)
    trainer.shutdown()
    server.engine.shutdown()


def test_no_adapter_may_have_the_label_of_a_draft() -> None:
    server = Taking(Net())
    trainer = registry.trainer("shm").trainer_init({}, client=server, source=ModuleSource(Net()))
    with pytest.raises(InvalidInput, match="send_draft"):
        trainer.send_adapter(DRAFT, StateDictSource({"fc": torch.ones(3)}), {}, for_base=False, deadline_s=20)
    with pytest.raises(InvalidInput, match="send_draft"):
        trainer.remove_adapter(DRAFT, deadline_s=20)
    trainer.shutdown()
    server.engine.shutdown()


def both(draft: float) -> Any:
    return with_draft(StateDictSource({"weight": torch.ones(2)}), StateDictSource({"weight": torch.full((3,), draft)}))


def test_a_version_of_both_names_the_draft_in_its_manifest() -> None:
    source = both(3.0)
    manifest = seal(plan(source.specs()), digests(source), version=1, epoch="e")
    assert {one.name for one in manifest.tensors} == {"weight", f"{DRAFT}weight"}
    assert manifest.root != seal(plan(source.specs()), digests(both(4.0)), version=1, epoch="e").root
