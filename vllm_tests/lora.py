"""An `LLM` that takes adapters, and their trainer, in one process: `python -m vllm_tests.lora MODEL BACKEND TP`.

The same adapter is held by three: by our plug-in, by vLLM from a PEFT folder, and merged into the reference model.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.lora.request import LoRARequest

from transfer_queue.errors import Incomplete, InvalidInput, NotSupported, ShapeMismatch, StaleVersion, UnknownTensor
from transfer_queue.integrations.vllm.adapters import lora_request
from transfer_queue.integrations.vllm.engine import WorkerEngine
from transfer_queue.integrations.vllm.plugin import ENGINES
from transfer_queue.weights import ModuleSource, StateDictSource
from transfer_queue.weights.receive.adapters import save
from transfer_queue.weights.transport import registry
from vllm_tests.in_process import Client
from vllm_tests.models import NUM_TOKENS, PROMPT, drawn

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj", "gate_proj"]  # not all parts of what vLLM packs
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": TARGETS}
LONG = [(7 * at) % 300 + 3 for at in range(300)]  # of more than two of vLLM's blocks, so its prefix is cached
CLOSE, FAR = 2e-3, 0.05  # of logprobs: the same adapter, another one
Tensors = dict[str, torch.Tensor]
Said = tuple[list[int], list[float]]  # greedy tokens, and the logprob of each


def adapter(model: Any, seed: int, rank: int = 4) -> Tensors:
    """Random halves for every target, large enough to change the answers."""
    made = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for path, layer in model.named_modules():
        if path.rsplit(".", 1)[-1] in TARGETS:
            name = f"base_model.model.{path}"
            found[f"{name}.lora_A.weight"] = torch.randn(rank, layer.in_features, generator=made) * 0.2
            found[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=made) * 0.2
    return found


def merged(model: Any, tensors: Tensors) -> Any:
    """The model with the adapter added to its weights."""
    new = copy.deepcopy(model)
    with torch.no_grad():
        for name in (one for one in tensors if ".lora_A." in one):
            a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            new.get_submodule(path).weight += CONFIG["lora_alpha"] / a.shape[0] * (b @ a)  # type: ignore[operator]
    return new


def logprobs(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """Of these tokens after the prompt."""
    with torch.no_grad():
        found = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    return [float(found[len(prompt) - 1 + at, token]) for at, token in enumerate(tokens)]


def away(said: Said, model: Any, prompt: list[int] = PROMPT) -> float:
    """How far the logprobs are from the model's, at most."""
    expected = logprobs(model, prompt, said[0])
    return max(abs(one - other) for one, other in zip(said[1], expected, strict=True))


class LoraClient(Client):
    """An `LLM` of several workers, whose caches are cleared."""

    def __init__(self, llm: Any, num_workers: int) -> None:
        super().__init__(llm)
        self._num_workers = num_workers
        self.clears = True

    def silent_workers(self) -> int:
        return self._num_workers

    def reset_prefix_cache(self) -> None:
        assert not self.clears or self._llm.reset_prefix_cache()


class Scene:
    """An `LLM`, the trainer's model and the trainer."""

    def __init__(self, folder: str, backend: str, tp: int) -> None:
        self.model = drawn(6)
        self.llm: Any = LLM(
            model=folder, dtype="float32", enforce_eager=True, max_model_len=512, enable_lora=True, max_lora_rank=8,
            max_loras=2, tensor_parallel_size=tp, weight_transfer_config=WeightTransferConfig(backend=backend),
            enable_prefix_caching=True,
        )  # fmt: skip
        transport = kind_of(backend)
        info: dict[str, Any] = {"collective": {"world_size": tp + 1}, "disk": {"root": tempfile.mkdtemp()}}.get(
            transport, {}
        )
        self.client = LoraClient(self.llm, tp)
        self.trainer = registry.trainer(transport).trainer_init(
            info, client=self.client, source=ModuleSource(self.model)
        )

    def says(self, request: Any = None, prompt: list[int] = PROMPT) -> Said:
        wanted = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
        found = self.llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False, lora_request=request)[0]
        tokens = list(found.outputs[0].token_ids)
        pairs = zip(found.outputs[0].logprobs, tokens, strict=True)
        return tokens, [one[token].logprob for one, token in pairs]

    def send(self, label: str, tensors: Tensors, **more: Any) -> Any:
        config = {**CONFIG, **more.pop("config", {})}
        return self.trainer.send_adapter(
            label, StateDictSource(tensors), config, **{"for_base": False, "deadline_s": 60, **more}
        )

    def answers(self, label: str, tensors: Tensors | None, prompt: list[int] = PROMPT) -> None:
        """Requests with this label have this adapter (None: none)."""
        expected = merged(self.model, tensors) if tensors else self.model
        found = away(self.says(lora_request(label), prompt), expected, prompt)
        assert found < CLOSE, (label, found)


def kind_of(backend: str) -> str:
    import transfer_queue.integrations.vllm.engine as engines

    kind: type[WorkerEngine] = getattr(engines, ENGINES[backend])
    return kind.transport


def an_adapter_answers_like_vllms_own_and_like_merged_weights(scene: Scene) -> None:
    one = adapter(scene.model, 1)
    scene.send("math", one)
    scene.answers("math", one)
    with tempfile.TemporaryDirectory() as folder:
        save(folder, StateDictSource(one), CONFIG)
        theirs = scene.says(LoRARequest("theirs", 7, folder))
    tokens, ours = scene.says(lora_request("math"))
    assert (tokens, max(abs(one - other) for one, other in zip(ours, theirs[1], strict=True)) < 1e-5) == (
        theirs[0],
        True,
    )
    assert away(scene.says(), scene.model) < CLOSE
    assert away(scene.says(), merged(scene.model, one)) > FAR


def a_newer_version_answers_at_once_and_no_cached_prefix_of_the_old_one(scene: Scene) -> None:
    one, two = adapter(scene.model, 1), adapter(scene.model, 2)
    scene.send("math", one)
    scene.answers("math", one, LONG)
    scene.answers("math", one, LONG)  # out of the cache
    report = scene.send("math", two)
    scene.answers("math", two, LONG)
    scene.send("code", one)
    scene.answers("code", one, LONG)
    scene.answers("math", two, LONG)
    found = scene.says(lora_request("math", report.version), LONG)
    assert away(found, merged(scene.model, two), LONG) < CLOSE


def a_path_with_a_version_finds_no_prefix_of_another_one(scene: Scene) -> None:
    one, two = adapter(scene.model, 1), adapter(scene.model, 2)
    scene.send("math", one)
    scene.answers("math", one, LONG)
    scene.client.clears = False
    report = scene.send("math", two)
    assert away(scene.says(lora_request("math", report.version), LONG), merged(scene.model, two), LONG) < CLOSE
    assert away(scene.says(lora_request("math"), LONG), merged(scene.model, two), LONG) > FAR  # what clearing is for
    scene.client.clears = True
    scene.llm.reset_prefix_cache()


def what_does_not_fit_is_refused_and_the_one_before_answers(scene: Scene) -> None:
    good = adapter(scene.model, 3)
    scene.send("math", good)
    first, second = list(good)[:2]
    stranger = {name.replace("layers.0", "layers.9"): one for name, one in good.items()}
    embeddings = {name.replace("q_proj", "input_layernorm"): one for name, one in good.items()}
    cases: list[tuple[type[Exception], Tensors, dict[str, Any]]] = [
        (NotSupported, adapter(scene.model, 4, rank=16), {"r": 16}),
        (NotSupported, good, {"use_dora": True}),
        (NotSupported, good, {"modules_to_save": ["lm_head"]}),
        (InvalidInput, good, {"r": 0}),
        (UnknownTensor, stranger, {}),
        (UnknownTensor, embeddings, {}),
        (UnknownTensor, {**good, "some.weight": torch.zeros(4)}, {}),
        (ShapeMismatch, {**good, first: torch.zeros(4, 9)}, {}),
        (ShapeMismatch, good, {"r": 2}),
        (Incomplete, {name: one for name, one in good.items() if name != second}, {}),
    ]
    for kind, tensors, config in cases:
        try:
            scene.send("math", tensors, config=config)
        except kind:
            scene.answers("math", good)
        else:
            raise AssertionError((kind, config))
    try:
        scene.send("math", good, version=1)
        raise AssertionError("an old number")
    except StaleVersion:
        pass
    scene.send("math", adapter(scene.model, 5))
    scene.answers("math", adapter(scene.model, 5))


def a_removed_one_answers_nothing_and_may_come_again(scene: Scene) -> None:
    one = adapter(scene.model, 6)
    scene.send("math", one)
    scene.answers("math", one, LONG)
    scene.trainer.remove_adapter("math", deadline_s=60)
    scene.answers("math", None, LONG)
    scene.send("math", one)
    scene.answers("math", one, LONG)
    scene.trainer.remove_adapter("nobody", deadline_s=60)
    scene.answers("nobody", None)


def one_for_certain_weights_is_never_added_to_others(scene: Scene) -> None:
    train(scene, 61)
    one, free = adapter(scene.model, 7), adapter(scene.model, 8)
    scene.send("math", one, for_base=True)
    scene.send("code", free)
    scene.answers("math", one)
    report = train(scene, 62)
    assert report.outdated == ("math",)
    assert away(scene.says(), scene.model) < CLOSE
    scene.answers("math", None)
    scene.answers("code", free)
    scene.send("math", one, for_base=True)
    scene.answers("math", one)


def train(scene: Scene, seed: int) -> Any:
    scene.model.load_state_dict(drawn(seed).state_dict())
    return scene.trainer.send_weights(deadline_s=60)


SCENES = (
    an_adapter_answers_like_vllms_own_and_like_merged_weights,
    a_newer_version_answers_at_once_and_no_cached_prefix_of_the_old_one,
    a_path_with_a_version_finds_no_prefix_of_another_one,
    what_does_not_fit_is_refused_and_the_one_before_answers,
    a_removed_one_answers_nothing_and_may_come_again,
    one_for_certain_weights_is_never_added_to_others,
)


@contextmanager
def named(what: str) -> Iterator[None]:
    yield
    print("well:", what, flush=True)


def main(folder: str, backend: str, tp: int) -> None:
    scene = Scene(folder, backend, tp)
    for part in SCENES:
        with named(part.__name__):
            part(scene)
    scene.trainer.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
