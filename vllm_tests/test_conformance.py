"""The suite that our own HTTP server has to pass, on a real vLLM with our engine. Its tokens say the version."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from transfer_queue.weights.transport.shm import ShmTrainer
from vllm_tests.models import constant, drawn, save
from vllm_tests.processes import ROOT
from vllm_tests.servers import Server
from vllm_tests.sources import Nobody, Odd

sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
from weights_http_conformance import CASES, Said, Subject, Update

FIRST, NUM_TOKENS = 10, 300  # tokens that stand for versions
LONG = 3900  # tokens of a request that does not end by itself in a test; it has to fit


class Publisher:
    """Makes versions that nobody is told of but by the suite's calls."""

    def __init__(self) -> None:
        self.model = drawn(5)
        self.source = Odd(self.model)
        self.trainer: Any = ShmTrainer.trainer_init({"silent": 0}, client=Nobody(), source=self.source)

    def publish(self, number: int, odd: str = "") -> dict[str, Any]:
        constant(FIRST + number % NUM_TOKENS, self.model)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(number * 1e-4)
            for layer in self.model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        self.source.odd = odd
        self.trainer.send_weights(number, deadline_s=60)
        return dict(self.trainer.catch_up_infos(60)[0])


@pytest.fixture(scope="module")
def subject(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    publisher = Publisher()
    folder = save(drawn(5), tmp_path_factory.mktemp("model"))
    server = start(folder, "tq_shm", 1, "--enable-server-load-tracking").wait()
    names = itertools.count()
    version_of = {(FIRST + number % NUM_TOKENS): number for number in range(NUM_TOKENS)}

    def generate(num_steps: int, request_id: str) -> Said:
        status, found = server.complete(min(num_steps, LONG), request_id=request_id or f"one-{next(names)}")
        if status != 200:
            return Said(status, "", [])
        choice = found["choices"][0]
        return Said(status, choice["finish_reason"], [version_of[token] for token in choice["token_ids"] or []])

    def metric(name: str) -> float:
        lines = str(server.ask("GET", "/metrics")[1]).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def bad(number: int) -> dict[str, Update]:
        unknown = publisher.publish(number, "unknown")
        return {
            "an unknown tensor": [unknown],
            "no such version": [{"version": number, "epoch": "none", "key": "0" * 32, "timeout_s": 5}],
            "nonsense": [{"version": "x"}],
        }

    found = Subject(
        server.url, server.token, publisher.trainer.receivers_info(), lambda number: [publisher.publish(number)], bad,
        generate, lambda: int(server.ask("GET", "/load")[1]["server_load"]),
        lambda: int(metric("vllm:generation_tokens_total")), typed=False, world_size=(1, 1), steps=300, long=LONG,
        holds=True, known_as=lambda name: f"cmpl-{name}-0",
        num_begun=lambda: int(metric("vllm:time_to_first_token_seconds_count")),
    )  # fmt: skip
    found.good("POST", "/init_weight_transfer_engine", {"init_info": found.init_info})
    yield found
    publisher.trainer.shutdown()
    server.stop()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(subject: Subject, case: Callable[[Subject], None]) -> None:
    case(subject)
