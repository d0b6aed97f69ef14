"""Adapters in a real vLLM: by an `LLM` in the trainer's process, and over HTTP by a server and one that comes late."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from transfer_queue.errors import NotSupported
from transfer_queue.weights import ModuleSource, StateDictSource
from transfer_queue.weights.transport import registry
from vllm_tests.lora import CONFIG, LONG, SCENES, adapter, merged
from vllm_tests.models import NUM_TOKENS, PROMPT, answer, drawn, save
from vllm_tests.processes import PATHS, ROOT
from vllm_tests.servers import Server

OPTIONS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
Start = Callable[..., Server]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("backend", "tp"), [("tq_shm", 1), ("tq_tcp", 2)])
def test_an_llm_answers_with_the_adapter_that_was_sent_last(tmp_path: Path, backend: str, tp: int) -> None:
    folder = save(drawn(6), tmp_path / "model")
    more = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": PATHS,
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp))),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tests.lora", str(folder), backend, str(tp)], cwd=ROOT, env={**os.environ, **more},
        capture_output=True, text=True, timeout=360, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("well:")] == [
        f"well: {scene.__name__}" for scene in SCENES
    ]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return drawn(6)


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(start: Start, folder: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        made = start(folder, "tq_tcp", 2, *OPTIONS)
    yield made.wait()
    made.stop()


@pytest.fixture(scope="module")
def trainer(server: Server, model: LlamaForCausalLM) -> Iterator[Any]:
    made = registry.trainer("tcp").trainer_init({}, client=server.client(), source=ModuleSource(model))
    yield made
    made.shutdown()


def say(server: Server, name: str, num_tokens: int = NUM_TOKENS, prompt: list[int] = PROMPT) -> tuple[int, Any]:
    """The status and, of 200, the tokens that the model of this name says."""
    body = {"model": name, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    status, found = server.ask("POST", "/v1/completions", body)
    return status, found["choices"][0]["token_ids"] if status == 200 else found


def name(server: Server, label: str, path: str = "") -> tuple[int, Any]:
    """Tell the server of the adapter."""
    return server.ask("POST", "/v1/load_lora_adapter", {"lora_name": label, "lora_path": path or f"tq:{label}"})


def test_a_server_that_was_told_once_answers_with_each_version(
    server: Server, model: LlamaForCausalLM, trainer: Any
) -> None:
    for seed in (1, 2, 3):
        tensors = adapter(model, seed)
        trainer.send_adapter("math", StateDictSource(tensors), CONFIG, for_base=False, deadline_s=60)
        if seed == 1:
            assert say(server, "math")[0] == 404
            assert name(server, "math")[0] == 200
        for prompt in (PROMPT, LONG):
            assert say(server, "math", prompt=prompt) == (200, answer(merged(model, tensors), prompt=prompt))
        assert say(server, "tiny") == (200, answer(model))


def test_requests_that_run_go_on_when_their_adapter_is_replaced_and_removed(
    server: Server, model: LlamaForCausalLM, trainer: Any
) -> None:
    source = StateDictSource(adapter(model, 4))
    trainer.send_adapter("running", source, CONFIG, for_base=False, deadline_s=60)
    assert name(server, "running")[0] == 200
    found: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: found.append(say(server, "running", 1500)))
    asking.start()
    for seed in (5, 6):
        new = StateDictSource(adapter(model, seed))
        trainer.send_adapter("running", new, CONFIG, for_base=False, deadline_s=60)
    trainer.remove_adapter("running", deadline_s=60)
    assert asking.is_alive()
    asking.join(120)
    assert (found[0][0], len(found[0][1])) == (200, 1500)
    assert say(server, "running") == (200, answer(model))


def test_one_that_does_not_fit_is_refused_by_every_worker(
    server: Server, model: LlamaForCausalLM, trainer: Any
) -> None:
    good = adapter(model, 7)
    trainer.send_adapter("fits", StateDictSource(good), CONFIG, for_base=False, deadline_s=60)
    assert name(server, "fits")[0] == 200
    large = StateDictSource(adapter(model, 8, rank=16))
    with pytest.raises(NotSupported, match="max_lora_rank 8"):
        trainer.send_adapter("fits", large, {**CONFIG, "r": 16}, for_base=False, deadline_s=60)
    assert say(server, "fits") == (200, answer(merged(model, good)))


def test_a_label_that_nobody_sent_is_answered_by_the_model_alone(server: Server, model: LlamaForCausalLM) -> None:
    assert name(server, "nobody")[0] == 200
    assert [say(server, one) for one in ("nobody", "tiny") * 3] == [(200, answer(model))] * 6


def test_a_server_that_comes_late_is_given_the_adapters_with_the_weights(
    server: Server, start: Start, folder: Path, model: LlamaForCausalLM, trainer: Any
) -> None:
    late = start(folder, "tq_tcp", 1, *OPTIONS, "--lora-modules", "late=tq:late")
    trainer.send_weights(deadline_s=60)
    tensors = adapter(model, 9)
    trainer.send_adapter("late", StateDictSource(tensors), CONFIG, deadline_s=60)
    assert say(late.wait(), "late") == (200, answer(model))
    trainer.join(late.client(), deadline_s=60)
    assert name(server, "late")[0] == 200
    assert say(late, "late") == say(server, "late") == (200, answer(merged(model, tensors)))
    late.stop()
