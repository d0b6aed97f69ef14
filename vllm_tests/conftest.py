"""Fixtures: servers that live as long as the session, and what each of them should say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from transfer_queue.weights import ModuleSource
from transfer_queue.weights.transport import registry
from transfer_queue.weights.transport.pending import SyncReport
from transfer_queue.weights.transport.trainer import TrainerEngine
from vllm_tests.figures import note, pytest_terminal_summary  # noqa: F401 (a hook)
from vllm_tests.models import answer, drawn, save
from vllm_tests.servers import Server

TRANSPORTS = {1: ("transfer_queue", "shm"), 2: ("tq_tcp", "tcp")}


class Site:
    """A server, the trainer's model, and what the server has to say now."""

    def __init__(self, server: Server, model: LlamaForCausalLM, transport: str, tp: int) -> None:
        self.server, self.model, self.transport, self.tp = server, model, transport, tp
        self.tied = bool(model.config.tie_word_embeddings)
        self.said = answer(model)
        self.label = "default"
        self._seed = 100 * tp

    def train(self) -> None:
        """Other weights, at the trainer."""
        self._seed += 1
        self.model.load_state_dict(drawn(self._seed, self.tied).state_dict())

    @contextmanager
    def trainer(
        self, source: Any = None, kind: type[TrainerEngine] | None = None, client: Any = None, **info: Any
    ) -> Iterator[Any]:
        made = (kind or registry.trainer(self.transport)).trainer_init(
            info, client=client or self.server.client(), source=source or ModuleSource(self.model)
        )
        try:
            yield made
        finally:
            made.shutdown()

    def update(self, trainer: TrainerEngine) -> SyncReport:
        """A good one: the server says what the reference says, under its label."""
        self.train()
        start = time.monotonic()
        report = trainer.send_weights(deadline_s=60)
        note(f"a whole update, TP = {self.tp}", time.monotonic() - start)
        note(f"its commit (`finish`), TP = {self.tp}", report.commit_s)
        self.said, self.label = answer(self.model), str(report.version)
        self.serves()
        return report

    def serves(self) -> None:
        """The weights that were committed last answer, under their label."""
        assert self.server.health() == 200
        assert self.server.say() == self.said
        assert self.server.client().get_weight_version() == self.label

    def recovers(self, trainer: TrainerEngine) -> SyncReport:
        """After a fault: what was there serves on, calls are in step, and the next update is good."""
        self.serves()
        before = self.server.client().compute_weight_checksums()[self.server.url]
        assert len({name.split(":tp")[1][0] for name in before}) == self.tp
        assert self.server.client().compare_weights(before)[self.server.url].match
        self.train()
        start = time.monotonic()
        report = trainer.send_weights(deadline_s=60)
        note(f"recovery: the next good update after a failed one, TP = {self.tp}", time.monotonic() - start)
        self.said, self.label = answer(self.model), str(report.version)
        self.serves()
        return report


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts a server (it is not up yet: `wait`); all are stopped in the end."""
    folder = tmp_path_factory.mktemp("servers")
    made: list[Server] = []

    def begin(model: Path, backend: str, tp: int = 1, *options: str) -> Server:
        made.append(Server(model, backend, folder / f"{len(made)}.log", tp, *options))
        return made[-1]

    yield begin
    for server in made:
        server.stop()


@pytest.fixture(scope="session", params=[1, 2], ids=["tp1", "tp2"])
def site(request: pytest.FixtureRequest, start: Callable[..., Server], tmp_path_factory: Any) -> Iterator[Site]:
    """A server with one worker and shared memory, or with two workers, tied embeddings and TCP."""
    tp = request.param
    backend, transport = TRANSPORTS[tp]
    model = drawn(tp, tied=tp == 2)
    server = start(save(model, tmp_path_factory.mktemp("model")), backend, tp).wait()
    note(f"a restart of the server, TP = {tp}", server.start_s)
    yield Site(server, model, transport, tp)
    server.stop()
