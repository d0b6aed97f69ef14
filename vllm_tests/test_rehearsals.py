"""What each of two tensor-parallel workers takes of a checkpoint, by architecture; a mixture of experts, loaded so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from transfer_queue.codec.dtypes import torch_dtype
from transfer_queue.errors import CommitFailed
from transfer_queue.weights import SafetensorsSource
from transfer_queue.weights.receive.targets import Metas
from transfer_queue.weights.transport import registry
from vllm_tests.drafts import REHEARSED, Filtered
from vllm_tests.families import checkpoint, made, metas_of
from vllm_tests.models import VOCABULARY, answer, save
from vllm_tests.servers import Server

TP = 2
EXPERT_PARALLEL = "--enable-expert-parallel"
SHARES = {
    "llama": (0.50, 0.50), "qwen2": (0.50, 0.50), "qwen3": (0.50, 0.50), "phi3": (0.50, 0.50), "glm4": (0.50, 0.50),
    "gemma3_text": (0.50, 0.50), "gpt_neox": (0.50, 0.50), "gpt2": (0.54, 0.53), "opt": (0.55, 0.54),
    "mixtral": (0.50, 0.50), "qwen3_moe": (0.50, 0.50), "deepseek_v3": (0.52, 0.52),
    "mixtral, expert parallel": (0.50, 0.50), "qwen3_moe, expert parallel": (0.50, 0.50),
    "llama, fp8": (0.50, 0.50), "qwen3_moe, fp8": (0.50, 0.50),
}  # fmt: skip


DRAFT_SHARES = {
    "draft_model": (0.50, 0.50), "eagle": (0.60, 0.60), "eagle3": (0.63, 0.61), "medusa": (0.64, 0.64),
    "mimo": (0.63, 0.63), "glm4_moe": (0.56, 0.56), "deepseek_v3": (0.55, 0.55), "qwen3_next": (0.50, 0.50),
}  # fmt: skip


def experts(seed: int) -> Any:
    """A mixture of experts whose answers are soon computed, with weights large enough that they differ clearly."""
    return made(
        "mixtral", seed, vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, num_attention_heads=4,
        max_position_embeddings=4096, initializer_range=0.4, dtype=torch.float32,
    )  # fmt: skip


@pytest.fixture(scope="module")
def serving(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Server]:
    """A server of `experts`, in two workers that rehearse."""

    def begin(seed: int, *options: str) -> Server:
        folder = save(experts(seed), tmp_path_factory.mktemp("experts"))
        extension = ("--worker-extension-cls", "vllm_tests.rehearsals.Rehearsals")
        return start(folder, "tq_tcp", TP, *extension, *options).wait()

    return begin


@pytest.fixture(scope="module")
def server(serving: Callable[..., Server]) -> Iterator[Server]:
    """Its workers have whole experts."""
    started = serving(0, EXPERT_PARALLEL)
    yield started
    started.stop()


def rehearsed(server: Server, folder: Path, metas: Metas, expert_parallel: bool) -> list[dict[str, Any]]:
    """What each worker would take."""
    asked = {"method": "rehearse", "args": [str(folder), metas, expert_parallel], "timeout": 60}
    status, found = server.ask("POST", "/collective_rpc", asked)
    assert status == 200, found
    return list(found["results"])


def num_nbytes(boxes: dict[str, Any], metas: Metas) -> int:
    return sum(
        math.prod(lengths) * torch_dtype(metas[name][0]).itemsize for name, some in boxes.items() for _, lengths in some
    )


def shares(found: list[dict[str, Any]], metas: Metas) -> tuple[float, ...]:
    whole = num_nbytes({name: [([], shape)] for name, (_, shape) in metas.items()}, metas)
    return tuple(round(num_nbytes(one["boxes"], metas) / whole, 2) for one in found)


def left_out(found: list[dict[str, Any]], metas: Metas) -> list[str]:
    """Tensors of which there is a part that no worker takes."""
    lacking = []
    for name, (_, shape) in metas.items():
        is_taken = torch.zeros(shape, dtype=torch.bool)
        for start, lengths in (box for one in found for box in one["boxes"].get(name, [])):
            is_taken[tuple(slice(at, at + n) for at, n in zip(start, lengths, strict=True))] = True
        if not is_taken.all():
            lacking.append(name)
    return lacking


def update(server: Server, folder: Path, expert_parallel: bool) -> None:
    """To the checkpoint in the folder; what is fetched is what the workers take."""
    metas = metas_of(folder)
    needed = sum(num_nbytes(one["boxes"], metas) for one in rehearsed(server, folder, metas, expert_parallel))
    trainer: Any = registry.trainer("tcp").trainer_init({}, client=server.client(), source=SafetensorsSource(folder))
    try:
        trainer.send_weights(deadline_s=60)
        assert needed <= trainer.num_served_nbytes <= 1.05 * needed
    finally:
        trainer.shutdown()


@pytest.mark.parametrize("kind", SHARES)
def test_what_each_worker_takes(server: Server, tmp_path: Path, kind: str) -> None:
    family, _, how = kind.partition(", ")
    metas = checkpoint(family, tmp_path, fp8=how == "fp8")
    found = rehearsed(server, tmp_path, metas, how == "expert parallel")
    assert [one["num_odd"] for one in found] == [0] * TP
    assert shares(found, metas) == SHARES[kind]
    assert left_out(found, metas) == []


@pytest.mark.parametrize("kind", DRAFT_SHARES)
def test_what_each_worker_takes_for_its_draft(server: Server, tmp_path: Path, kind: str) -> None:
    """`DRAFT_SHARES`: of the draft's own tensors. A layer that drafts in the model's checkpoint reaches it."""
    settings, make, _ = REHEARSED[kind]
    folders = make(0, tmp_path)
    metas = metas_of(folders.draft or folders.model)
    draft = str(folders.draft) if folders.draft else None
    asked = {"method": "rehearse_draft", "args": [str(folders.model), draft, settings, metas], "timeout": 110}
    status, answered = server.ask("POST", "/collective_rpc", asked)
    assert status == 200, answered
    found = list(answered["results"])
    own = {name: meta for name, meta in metas.items() if draft or not Filtered(folders.model, "mtp").has(name)}
    if draft is None:
        assert own
        assert [set(one["left"]) for one in found] == [set(own)] * TP
    assert [one["num_odd"] for one in found] == [0] * TP
    boxes = [{"boxes": {name: one["boxes"].get(name, []) for name in own}} for one in found]
    assert shares(boxes, own) == DRAFT_SHARES[kind]
    assert left_out(boxes, own) == []


def test_a_mixture_of_experts_gets_each_byte_once(serving: Callable[..., Server], tmp_path: Path) -> None:
    server = serving(0)
    assert server.say() == answer(experts(0))
    for version in (1, 2):
        update(server, save(experts(version), tmp_path / str(version)), expert_parallel=False)
        assert server.say() == answer(experts(version))
    server.break_loader(1, rank=1)
    with pytest.raises(CommitFailed):
        update(server, save(experts(3), tmp_path / "3"), expert_parallel=False)
    assert server.say() == answer(experts(2))
    server.stop()


def test_workers_with_whole_experts_get_theirs(server: Server, serving: Callable[..., Server], tmp_path: Path) -> None:
    """The weights are compared with those of a fresh server: vLLM 0.32 has no kernel for CPUs that could run them."""
    fresh = serving(3, EXPERT_PARALLEL)
    update(server, save(experts(3), tmp_path), expert_parallel=True)
    sums = server.client().compute_weight_checksums()[server.url]
    assert sums == fresh.client().compute_weight_checksums()[fresh.url]
    fresh.stop()
