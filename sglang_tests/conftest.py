"""Fixtures: servers that live as long as the session, and what each of them should say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from sglang_tests.kernels import stand_in

stand_in()

from transformers import LlamaForCausalLM  # noqa: E402

from sglang_tests.servers import Server  # noqa: E402
from transfer_queue.integrations.sglang.client import PauseMode  # noqa: E402
from transfer_queue.weights import ModuleSource  # noqa: E402
from transfer_queue.weights.transport import registry  # noqa: E402
from transfer_queue.weights.transport.pending import SyncReport  # noqa: E402
from transfer_queue.weights.transport.trainer import TrainerEngine  # noqa: E402
from vllm_tests.figures import note, pytest_terminal_summary  # noqa: E402, F401 (a hook)
from vllm_tests.models import answer, drawn, save  # noqa: E402

Transport = Literal["tcp", "shm"]
TRANSPORTS: dict[int, Transport] = {1: "shm", 2: "tcp"}


class Site:
    """A server, the trainer's model, and what the server has to say now."""

    def __init__(self, server: Server, model: LlamaForCausalLM, transport: Transport) -> None:
        self.server, self.model, self.transport, self.tp = server, model, transport, server.tp
        self.tied = bool(model.config.tie_word_embeddings)
        self.said = answer(model)
        self.label = "default"
        self._seed = 100 * self.tp

    def train(self) -> None:
        """Other weights, at the trainer."""
        self._seed += 1
        self.model.load_state_dict(drawn(self._seed, self.tied).state_dict())

    @contextmanager
    def trainer(
        self,
        source: Any = None,
        *,
        kind: type[TrainerEngine] | None = None,
        pause: PauseMode = "retract",
        transport: Transport | None = None,
        **info: Any,
    ) -> Iterator[Any]:
        transport = transport or self.transport
        made = (kind or registry.trainer(transport)).trainer_init(
            info, client=self.server.client(transport, pause), source=source or ModuleSource(self.model)
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
        found = self.server.generate()
        assert (found["output_ids"], found["meta_info"]["weight_version"]) == (self.said, self.label)
        assert self.server.client().get_weight_version() == self.label


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts a server (it is not up yet: `wait`); all are stopped in the end."""
    folder = tmp_path_factory.mktemp("servers")
    made: list[Server] = []

    def begin(model: Path, tp: int, *options: str, **more: Any) -> Server:
        made.append(Server(model, folder / f"{len(made)}.log", tp, *options, **more))
        return made[-1]

    yield begin
    for server in made:
        server.stop()


@pytest.fixture(scope="session", params=[1, 2], ids=["tp1", "tp2"])
def site(request: pytest.FixtureRequest, start: Callable[..., Server], tmp_path_factory: Any) -> Iterator[Site]:
    """A server with one worker and shared memory; or with two workers, tied embeddings and TCP, where SGLang makes a
    batch only when the one before has ended."""
    tp = request.param
    model = drawn(tp, tied=tp == 2)
    options = ["--disable-overlap-schedule"] if tp == 2 else []
    server = start(save(model, tmp_path_factory.mktemp("model")), tp, *options).wait()
    note(f"a restart of the server, TP = {tp}", server.start_s)
    yield Site(server, model, TRANSPORTS[tp])
    server.stop()
