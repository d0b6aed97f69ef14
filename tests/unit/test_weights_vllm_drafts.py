"""Drafts in vLLM's workers, with a stand-in for vLLM. `make test-vllm` has the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from vllm_stand_in import Client, Model, config, put_in_place, weights

from transfer_queue.errors import (
    CommitFailed,
    Incomplete,
    NotSupported,
    ShapeMismatch,
    TransferQueueError,
    UnknownTensor,
)
from transfer_queue.weights import StateDictSource, with_draft
from transfer_queue.weights.fleet import Fleet
from transfer_queue.weights.transport import registry
from transfer_queue.weights.version.drafts import DRAFT


@pytest.fixture(autouse=True)
def _a_place_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, twins=True)


class Speculating(Client):
    """A worker whose model runner has a draft, unless `has_draft` says otherwise. `drafter`: what the runner calls what
    speculates. `more`: other settings of that."""

    def __init__(
        self, folder: Path, *, has_draft: bool = True, is_elsewhere: bool = False, drafter: str = "drafter", **more: Any
    ) -> None:
        from transfer_queue.integrations.vllm.engine import ShmWorker

        settings = config(folder)
        (folder / "draft").mkdir()
        save_file(weights(1.0), folder / "draft" / "model.safetensors")
        model = SimpleNamespace(**{**vars(settings.model_config), "model": str(folder / "draft")})
        settings.compilation_config = SimpleNamespace(static_forward_context={})
        settings.speculative_config = SimpleNamespace(method="draft_model", draft_model_config=model, **more)
        self.draft = Model()
        self.model_runner = SimpleNamespace(get_draft_model=lambda: self.draft if has_draft else None)
        if not is_elsewhere:
            setattr(self.model_runner, drafter, SimpleNamespace(_draft_vllm_config=settings))
        self.engine = ShmWorker(SimpleNamespace(backend="tq_shm"), settings, torch.device("cpu"), Model())
        super().__init__(self.engine)

    def has(self, model: float, draft: float) -> bool:
        live = (self.engine.model, model), (self.draft, draft)
        return all(torch.equal(one, torch.full_like(one, value)) for of, value in live for one in of.parameters())


def both(model: float, draft: float, **odd: torch.Tensor) -> Any:
    return with_draft(StateDictSource(weights(model)), StateDictSource({**weights(draft), **odd}))


def raises(_: object) -> None:
    raise RuntimeError("as the test wanted")


def introduced(server: Client, source: Any) -> Any:
    return registry.trainer("shm").trainer_init({}, client=server, source=source)


@pytest.mark.parametrize("which", ["model", "draft"])
def test_a_load_that_fails_in_one_of_them_leaves_both_as_they_were(
    tmp_path: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = Speculating(tmp_path)
    trainer = introduced(server, both(2.0, 3.0))
    broken = server.draft if which == "draft" else server.engine.model
    with torch.no_grad():
        for one in (*server.engine.model.parameters(), *server.draft.parameters()):
            one.fill_(1.0)  # what the folders have
    for model, draft in ((1.0, 1.0), (2.0, 3.0)):
        broken.fails_after = 1
        with pytest.raises(CommitFailed, match="was loaded again"):
            trainer.send_weights(deadline_s=20)
        assert server.has(model, draft)
        trainer._source = both(2.0, 3.0)
        trainer.send_weights(deadline_s=20)
        assert server.has(2.0, 3.0)
        trainer._source = both(4.0, 5.0)
    server.engine.shutdown()
    trainer.shutdown()
    caplog.clear()  # its tracebacks hold the weights


def test_a_draft_alone_that_fails_leaves_the_one_before_and_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Speculating(tmp_path)
    trainer = introduced(server, StateDictSource(weights(2.0)))
    trainer.send_weights(deadline_s=20)
    trainer.send_draft(StateDictSource(weights(3.0)), deadline_s=20)
    assert server.has(2.0, 3.0)
    server.draft.fails_after = 1
    with pytest.raises(CommitFailed, match="was loaded again"):
        trainer.send_draft(StateDictSource(weights(4.0)), deadline_s=20)
    assert server.has(2.0, 3.0)
    trainer._source = StateDictSource(weights(5.0))
    trainer.send_weights(deadline_s=20)
    assert server.has(5.0, 3.0)
    server.engine.shutdown()
    trainer.shutdown()
    caplog.clear()


def test_a_draft_that_is_a_mixture_counts_as_not_there_until_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Speculating(tmp_path)
    trainer = introduced(server, StateDictSource(weights(2.0)))
    trainer.send_weights(deadline_s=20)
    trainer.send_draft(StateDictSource(weights(3.0)), deadline_s=20)
    assert DRAFT in server.engine.installed().adapters
    with monkeypatch.context() as patch:
        patch.setattr(server.draft, "load_weights", raises)
        with pytest.raises(CommitFailed, match="so did going back"):
            trainer.send_draft(StateDictSource(weights(4.0)), deadline_s=20)
    info = server.engine.installed()
    assert (DRAFT in info.adapters, info.dirty) == (False, False)
    trainer.send_draft(StateDictSource(weights(5.0)), deadline_s=20)
    assert DRAFT in server.engine.installed().adapters
    assert server.has(2.0, 5.0)
    server.engine.shutdown()
    trainer.shutdown()
    caplog.clear()


class Labelled:
    """A server of a fleet that has a label and no status."""

    def __init__(self, server: Speculating) -> None:
        self._server, self._label = server, "default"
        self.num_met = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def silent_workers(self) -> int:
        return 1

    def init_weight_transfer_engine(self, info: Any) -> None:
        self.num_met += 1
        self._server.init_weight_transfer_engine(info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._server.finish_weight_update(weight_version)
        self._label = weight_version or self._label

    def get_weight_version(self) -> str:
        return self._label

    def status(self) -> Any:
        raise NotSupported("it has none")


def test_a_server_of_a_fleet_that_has_no_status_stays_ready_with_a_draft(tmp_path: Path) -> None:
    member = Labelled(server := Speculating(tmp_path))
    fleet = Fleet({"a": member}, heartbeat_s=30.0, fence=None)
    trainer = introduced(cast("Client", fleet), StateDictSource(weights(2.0)))
    for value in (2.0, 3.0):
        trainer._source = StateDictSource(weights(value))
        trainer.send_weights(deadline_s=20)
        trainer.send_draft(StateDictSource(weights(value + 5)), deadline_s=20)
        assert fleet.ready() == ["a"]
        assert server.has(value, value + 5)
    assert member.num_met == 1
    fleet.close()
    trainer.shutdown()
    server.engine.shutdown()


@pytest.mark.parametrize(
    ("odd", "error"),
    [
        ({"surplus": torch.ones(2)}, UnknownTensor),
        ({"linear.bias": torch.ones(3)}, ShapeMismatch),
        ({"linear.bias": None}, Incomplete),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_with_the_weights_it_came_with(
    tmp_path: Path, odd: dict[str, Any], error: type[TransferQueueError]
) -> None:
    server = Speculating(tmp_path)
    trainer = introduced(server, both(2.0, 3.0))
    trainer.send_weights(deadline_s=20)
    draft = {name: one for name, one in {**weights(5.0), **odd}.items() if one is not None}
    trainer._source = with_draft(StateDictSource(weights(4.0)), StateDictSource(draft))
    with pytest.raises(error):
        trainer.send_weights(deadline_s=20)
    assert server.has(2.0, 3.0)
    server.engine.shutdown()
    trainer.shutdown()


def test_a_server_without_a_draft_refuses_one(tmp_path: Path) -> None:
    server = Speculating(tmp_path, has_draft=False)
    trainer = introduced(server, StateDictSource(weights(2.0)))
    with pytest.raises(NotSupported, match="no draft model"):
        trainer.send_draft(StateDictSource(weights(3.0)), deadline_s=20)
    trainer._source = both(2.0, 3.0)
    with pytest.raises(NotSupported, match="no draft model"):
        trainer.send_weights(deadline_s=20)
    server.engine.shutdown()
    trainer.shutdown()


def test_the_draft_of_the_second_runner_takes_weights(tmp_path: Path) -> None:
    server = Speculating(tmp_path, drafter="speculator")
    trainer = introduced(server, both(2.0, 3.0))
    trainer.send_weights(deadline_s=20)
    assert server.has(2.0, 3.0)
    trainer.shutdown()
    server.engine.shutdown()


def test_a_draft_with_a_quantized_copy_of_the_head_is_refused(tmp_path: Path) -> None:
    server = Speculating(tmp_path, drafter="speculator", draft_lm_head_quantization="fp8")
    trainer = introduced(server, both(2.0, 3.0))
    with pytest.raises(NotSupported, match="draft_lm_head_quantization"):
        trainer.send_weights(deadline_s=20)
    trainer.shutdown()
    server.engine.shutdown()


def test_a_worker_of_a_pipeline_whose_draft_another_one_has_leaves_it_out(tmp_path: Path) -> None:
    server = Speculating(tmp_path, has_draft=False, is_elsewhere=True)
    trainer = introduced(server, both(2.0, 3.0))
    trainer.send_weights(deadline_s=20)
    assert torch.equal(server.engine.model.linear.bias, torch.full((2,), 2.0))
    server.engine.shutdown()
    trainer.shutdown()


# layers that draft in the model's checkpoint

MTP = "mtp."


class Above(Model):
    """Leaves the layers alone that draft."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(one for one in weights if not one[0].startswith(MTP))


class Layers(Model):
    """Takes them, and nothing else."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        own = ((name.removeprefix(MTP), tensor) for name, tensor in weights if name.startswith(MTP))
        return super().load_weights(own)


class OfOneCheckpoint(Client):
    def __init__(self, folder: Path) -> None:
        from transfer_queue.integrations.vllm.engine import ShmWorker

        settings = config(folder)
        save_file(checkpoint(1.0, 1.0), folder / "model.safetensors")
        settings.compilation_config = SimpleNamespace(static_forward_context={})
        settings.model_config.make = Above
        drafts = SimpleNamespace(**{**vars(settings.model_config), "make": Layers})
        settings.speculative_config = SimpleNamespace(method="mtp", draft_model_config=drafts)
        self.model, self.draft = Above(), (draft := Layers())
        self.model_runner = SimpleNamespace(get_draft_model=lambda: draft, drafter=SimpleNamespace())
        self.engine = ShmWorker(SimpleNamespace(backend="tq_shm"), settings, torch.device("cpu"), self.model)
        super().__init__(self.engine)

    def has(self) -> tuple[float, float]:
        return float(self.model.linear.bias.detach()[0]), float(self.draft.linear.bias.detach()[0])


def checkpoint(model: float, draft: float) -> dict[str, torch.Tensor]:
    return {**weights(model), **{MTP + name: one for name, one in weights(draft).items()}}


def test_layers_in_the_checkpoint_of_the_model_reach_the_draft_or_leave_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = OfOneCheckpoint(tmp_path)
    trainer = introduced(server, StateDictSource(checkpoint(2.0, 3.0)))
    trainer.send_weights(deadline_s=20)
    assert server.has() == (2.0, 3.0)
    trainer._source = StateDictSource(weights(4.0))
    trainer.send_weights(deadline_s=20)
    assert server.has() == (4.0, 3.0)
    half = checkpoint(5.0, 6.0)
    del half[f"{MTP}linear.bias"]
    trainer._source = StateDictSource(half)
    with pytest.raises(Incomplete, match="a part of the draft"):
        trainer.send_weights(deadline_s=20)
    trainer._source = StateDictSource(checkpoint(5.0, 6.0))
    server.draft.fails_after = 1
    with pytest.raises(CommitFailed, match="was loaded again"):
        trainer.send_weights(deadline_s=20)
    assert server.has() == (4.0, 3.0)
    with pytest.raises(NotSupported, match="lies in the checkpoint"):
        trainer.send_draft(StateDictSource(weights(7.0)), deadline_s=20)
    trainer.send_weights(deadline_s=20)
    assert server.has() == (5.0, 6.0)
    server.engine.shutdown()
    trainer.shutdown()
    caplog.clear()
