"""An `LLM` that speculates, and a trainer of its model and draft: `python -m vllm_tests.drafting KIND BACKEND TP`.

Both models are held against what vLLM itself makes of the same checkpoints.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from transfer_queue.errors import (
    CommitFailed,
    Incomplete,
    InvalidInput,
    NotSupported,
    ShapeMismatch,
    TransferQueueError,
    UnknownTensor,
)
from transfer_queue.weights import SafetensorsSource, StateDictSource, WeightSource, with_draft
from transfer_queue.weights.transport import registry
from vllm_tests.drafts import KINDS, Filtered, Folders
from vllm_tests.lora import LoraClient, kind_of
from vllm_tests.models import NUM_TOKENS, PROMPT


class Turning:
    """A source of which each version may have another one's tensors."""

    def __init__(self, now: WeightSource) -> None:
        self.now = now

    def specs(self) -> Any:
        return self.now.specs()

    def tensors(self) -> Any:
        return self.now.tensors()

    def aliases(self) -> Any:
        return self.now.aliases()


class Scene:
    """An `LLM` that began with version 0, and the versions that its models should be of."""

    def __init__(self, kind: str, backend: str, tp: int, root: Path) -> None:
        self.kind, self.transport, self.tp, self._root = KINDS[kind], kind_of(backend), tp, root
        self._folders: dict[int, Folders] = {}
        first = self.folders(0)
        self.inside = first.draft is None
        settings = dict(self.kind.settings)
        if first.draft is not None:
            settings["model"] = str(first.draft)
        self.llm: Any = LLM(
            model=str(first.model), dtype="float32", enforce_eager=True, max_model_len=512, tensor_parallel_size=tp,
            weight_transfer_config=WeightTransferConfig(backend=backend), speculative_config=settings,
            worker_extension_cls="vllm_tests.draft_probes.DraftProbes", disable_log_stats=False, **self.kind.more,
        )  # fmt: skip
        self.live = {"model": 0, "draft": 0}
        self.source = Turning(first.source())
        self.trainer = self.introduced(self.source)

    def introduced(self, source: Any, **info: Any) -> Any:
        client = LoraClient(self.llm, self.tp)
        return registry.trainer(self.transport).trainer_init(info, client=client, source=source)

    def folders(self, seed: int) -> Folders:
        if seed not in self._folders:
            self._folders[seed] = self.kind.make(seed, self._root / str(seed))
        return self._folders[seed]

    def send(self, seed: int) -> None:
        """Both models, in one version."""
        self.source.now = self.folders(seed).source()
        self.trainer.send_weights(deadline_s=60)
        self.live = {"model": seed, "draft": seed}

    def serves(self) -> None:
        """Both models are of the versions that were committed last, and answer."""
        folders = {which: self.folders(seed) for which, seed in self.live.items()}
        draft = folders["draft"].draft or folders["draft"].model
        expected = self.llm.collective_rpc("sums_of", args=(str(folders["model"].model), str(draft)))
        for rank, (found, wanted) in enumerate(zip(self.llm.collective_rpc("sums"), expected, strict=True)):
            for which in ("model", "draft"):
                assert found[which], which
                other = {name for name, one in found[which].items() if wanted[which].get(name) != one}
                assert not other, (rank, which, self.live, sorted(other))
        assert len(self.answer()) == NUM_TOKENS

    def answer(self) -> list[int]:
        wanted = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        found = self.llm.generate([{"prompt_token_ids": PROMPT}], wanted, use_tqdm=False)
        return list(found[0].outputs[0].token_ids)

    def accepted(self) -> float:
        """The share of the draft's tokens that the model accepts."""

        def counted() -> list[int]:
            names = [f"vllm:spec_decode_num_{one}_tokens" for one in ("accepted", "draft")]
            found = {one.name: one.value for one in self.llm.get_metrics() if one.name in names}
            return [found.get(name, 0) for name in names]

        before = counted()
        self.answer()
        accepted, drafted = (now - then for now, then in zip(counted(), before, strict=True))
        return float(accepted / drafted)

    def fails(self, error: type[TransferQueueError], call: Callable[[], object]) -> None:
        try:
            call()
        except error:
            self.serves()
        else:
            raise AssertionError(f"no {error.__name__}")


def both_come_with_one_version(scene: Scene) -> None:
    scene.serves()
    for seed in (1, 2):
        scene.send(seed)
        scene.serves()


def a_load_that_fails_in_one_of_the_models_leaves_both_as_they_were(scene: Scene) -> None:
    for which in ("draft", "model"):
        for rank in (-1, scene.tp - 1):
            scene.llm.collective_rpc("break_model", args=(which, 1, rank))
            scene.fails(CommitFailed, lambda: scene.send(3))
    scene.send(3)
    scene.serves()


def a_draft_that_does_not_fit_is_refused_before_anything_changes(scene: Scene) -> None:
    folders = scene.folders(4)
    own = SafetensorsSource(folders.draft or folders.model)
    layers = [one.name for one in own.specs() if folders.draft or not Filtered(folders.model, "mtp").has(one.name)]
    tensors, name = dict(own.tensors()), next(one for one in layers if one.endswith("proj.weight") or "blocks" in one)
    cases: list[tuple[type[TransferQueueError], dict[str, torch.Tensor]]] = [
        (UnknownTensor, {**tensors, f"{name}.surplus": torch.zeros(2)}),
        (ShapeMismatch, {**tensors, name: torch.zeros(3, 5)}),
        (Incomplete, {one: tensor for one, tensor in tensors.items() if one != name}),
    ]
    for error, given in cases:
        odd: WeightSource = StateDictSource(given)
        scene.source.now = with_draft(SafetensorsSource(folders.model), odd) if folders.draft else odd
        scene.fails(error, lambda: scene.trainer.send_weights(deadline_s=60))
    scene.send(4)
    scene.serves()


def versions_without_a_draft_leave_it_as_it_is(scene: Scene) -> None:
    for seed in (5, 6):
        scene.source.now = scene.folders(seed).source(without_draft=True)
        scene.trainer.send_weights(deadline_s=60)
        scene.live["model"] = seed
        scene.serves()
    scene.llm.collective_rpc("break_model", args=("draft", 1, 0))
    scene.fails(CommitFailed, lambda: scene.send(7))
    scene.send(7)
    scene.serves()


def a_draft_comes_apart_or_is_told_to_come_with_the_weights(scene: Scene) -> None:
    folders = scene.folders(8)
    trainer = scene.introduced(Turning(folders.source(without_draft=True)))
    draft = SafetensorsSource(folders.draft or folders.model)
    if scene.inside:
        scene.fails(NotSupported, lambda: trainer.send_draft(draft, deadline_s=60))
    else:
        assert trainer.send_draft(draft, deadline_s=60).version == 1
        scene.live["draft"] = 8
        scene.serves()
        newer = SafetensorsSource(scene.folders(9).draft or "")
        scene.llm.collective_rpc("break_model", args=("draft", 1, scene.tp - 1))
        scene.fails(CommitFailed, lambda: trainer.send_draft(newer, deadline_s=60))
        lacks = StateDictSource(dict(list(newer.tensors())[1:]))
        scene.fails(Incomplete, lambda: trainer.send_draft(lacks, deadline_s=60))
        trainer.send_weights(deadline_s=60)
        scene.live["model"] = 8
        scene.serves()
        assert trainer.send_draft(newer, deadline_s=60).version >= 2
        scene.live["draft"] = 9
        scene.serves()
    trainer.shutdown()
    scene.trainer = scene.introduced(scene.source)
    scene.source.now = scene.folders(1).source()
    if not scene.inside:
        scene.fails(InvalidInput, lambda: scene.trainer.send_draft(draft, deadline_s=60))
    scene.send(1)
    scene.serves()


def differences_reach_both(scene: Scene) -> None:
    scene.trainer.shutdown()
    scene.trainer = scene.introduced(scene.source, anchor_every=9)
    scene.source.now = scene.folders(2).source()
    kinds = [scene.trainer.send_weights(deadline_s=60).kind for _ in range(2)]
    assert kinds == ["full", "delta"], kinds
    scene.live = {"model": 2, "draft": 2}
    scene.serves()
    scene.llm.collective_rpc("break_model", args=("draft", 1, 0))
    scene.fails(CommitFailed, lambda: scene.send(3))
    scene.send(4)
    scene.serves()


def a_draft_that_is_the_model_has_all_its_tokens_accepted(scene: Scene) -> None:
    for seed in (1, 2):
        scene.send(seed)
        assert scene.accepted() == 1.0
    scene.source.now = scene.folders(3).source(without_draft=True)
    scene.trainer.send_weights(deadline_s=60)
    assert scene.accepted() < 0.5


SCENES = (
    both_come_with_one_version,
    a_load_that_fails_in_one_of_the_models_leaves_both_as_they_were,
    a_draft_that_does_not_fit_is_refused_before_anything_changes,
    versions_without_a_draft_leave_it_as_it_is,
    a_draft_comes_apart_or_is_told_to_come_with_the_weights,
    differences_reach_both,
)


def scenes_of(kind: str) -> tuple[Callable[[Scene], None], ...]:
    return (*SCENES, a_draft_that_is_the_model_has_all_its_tokens_accepted) if kind == "draft_model" else SCENES


def main(kind: str, backend: str, tp: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        scene = Scene(kind, backend, tp, Path(root))
        for part in scenes_of(kind):
            part(scene)
            print("well:", part.__name__, flush=True)
        scene.trainer.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
