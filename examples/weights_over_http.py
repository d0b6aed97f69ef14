"""A remote server: it samples in a process of its own, the trainer reaches it over HTTP, and the weights go over TCP.

    python weights_over_http.py [--steps 10]

The server has the paths, bodies and answers of vLLM's, so the trainer's side is the same for both. A wrong token
and calls out of order are refused, and do the server no harm.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe, connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

import transfer_queue as tq
from transfer_queue.errors import AccessDenied, NotInitialized, NotOpen, TransferQueueError
from transfer_queue.weights import Control, ModuleSource, Receiver, Spans, Swap
from transfer_queue.weights.http import WeightSyncClient, serve
from transfer_queue.weights.transport import registry

ROWS, LENGTH = 64, 16
VOCABULARY = 16
PATIENCE_S = 600  # how long the trainer waits for rows; a server that ends is noticed at once
FIELDS = ["prompt", "response", "log_probs"]


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the tokens that follow."""
        logits: Tensor = self.table(tokens)
        return logits


class Sampler:
    """An inference server. Its control takes new weights between two batches."""

    def __init__(self) -> None:
        self.receiver = Receiver(Swap(Policy()))
        self.engine = registry.engine("tcp")(self.receiver)
        self.control = Control(self.engine, self.receiver)
        self._generator = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def sample(self, count: int, length: int) -> tuple[TensorDict, list[dict[str, Any]]]:
        """Fields and tags of `count` rows: the tag says which version made them."""
        prompt = torch.randint(VOCABULARY, (count,), generator=self._generator)
        tokens, log_probs, last = [], [], prompt
        with self.receiver.reading() as live:
            for _ in range(length):
                chances = live.module(last).log_softmax(-1)
                last = torch.multinomial(chances.exp(), 1, generator=self._generator).squeeze(1)
                tokens.append(last)
                log_probs.append(chances.gather(1, last[:, None]).squeeze(1))
            spans = Spans()
            spans.add(live.tag)
        columns = {"prompt": prompt, "response": torch.stack(tokens, 1), "log_probs": torch.stack(log_probs, 1)}
        return TensorDict({name: column.clone() for name, column in columns.items()}, count), [spans.tag()] * count


def train(policy: Policy, optimizer: torch.optim.Optimizer, rows: TensorDict) -> float:
    """One step of the clipped policy gradient; the mean reward: the share of tokens one more than the one before.
    Ratios are to the log-probs that were recorded, so rows that several versions made are right."""
    prompt, response, old_log_probs = (rows[name] for name in FIELDS)
    before = torch.cat([prompt[:, None], response[:, :-1]], 1)
    reward = (response == (before + 1) % VOCABULARY).float()
    log_probs = policy(before).log_softmax(-1).gather(2, response[:, :, None]).squeeze(2)
    ratio = (log_probs - old_log_probs).exp()
    advantage = reward - reward.mean()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return float(reward.mean())


@contextmanager
def watched(*processes: BaseProcess) -> Iterator[None]:
    """Processes that run beside the block; it ends when they have. One that fails ends it whatever the block waits
    for: nobody would send that any more. No process is left."""
    failed: list[str] = []
    left, main_thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        running: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
        while running:
            for sentinel in connection.wait(list(running)):
                process = running.pop(sentinel)
                process.join()
                if process.exitcode and not left.is_set():
                    failed.append(f"{process.name} ended with exit code {process.exitcode}")
                    signal.pthread_kill(main_thread, signal.SIGINT)  # as Ctrl-C does
                    return

    for process in processes:
        process.start()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
        watcher.join()
    except KeyboardInterrupt:
        raise SystemExit(failed[0] if failed else 130) from None
    finally:
        left.set()
        for process in processes:
            process.kill()


def server(told: Connection[Any, Any], token: str) -> None:
    """Sample until the trainer wants no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started this process
    torch.set_num_threads(1)
    tq.init()
    sampler = Sampler()
    with serve(sampler.control, token=token) as http:
        told.send(http.url)
        while told.recv():
            fields, tags = sampler.sample(ROWS, LENGTH)
            keys = [f"{tags[0]['weight_version']}/{row}" for row in range(ROWS)]
            tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)
    sampler.engine.shutdown()


def refused(client: WeightSyncClient, url: str) -> list[str]:
    """What the server has against a few calls."""
    calls: list[tuple[type[TransferQueueError], Callable[[], None]]] = [
        (AccessDenied, lambda: WeightSyncClient(url, "wrong token").start_weight_update()),
        (NotOpen, lambda: client.update_weights({"version": 1})),
        (NotInitialized, client.start_weight_update),
    ]
    codes = []
    for expected, call in calls:
        try:
            call()
        except expected as error:
            codes.append(error.code)
    return codes


def run(steps: int, told: Connection[Any, Any], token: str) -> None:
    torch.manual_seed(0)
    queue = tq.get_client()
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    url = told.recv()
    client = WeightSyncClient([url], token, timeout_s=10)
    print(f"a server at {url}, version {client.get_weight_version()!r}; refused: {', '.join(refused(client, url))}")
    trainer = registry.trainer("tcp").trainer_init({}, client=client, source=ModuleSource(policy))
    for step in range(steps):
        report = trainer.send_weights(deadline_s=10)
        tq.set_weight_version(report.version, report.run_id)
        told.send(True)
        rows = queue.get_meta(
            FIELDS, ROWS, "train", task_name="trainer", sampling_config={"max_staleness": 0}, timeout_s=PATIENCE_S
        )
        reward = train(policy, optimizer, queue.get_data(rows, dense=True))
        queue.clear_samples(rows)
        if step in (0, steps - 1):
            print(f"version {client.get_weight_version()}: reward {reward:.0%}, update {report.update_s * 1e3:.0f} ms")
    installed = client.status().installed
    told.send(False)
    trainer.shutdown()
    assert installed is not None
    print(f"{steps} versions over HTTP, the server has version {installed.version} of this trainer's run")
    assert installed.run_id == trainer.run_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tq.init()
    mine, theirs = Pipe()
    token = secrets.token_urlsafe()
    remote = get_context("spawn").Process(target=server, args=(theirs, token), name="the server", daemon=True)
    try:
        with watched(remote):
            run(arguments.steps, mine, token)
    finally:
        tq.close()


if __name__ == "__main__":
    main()
