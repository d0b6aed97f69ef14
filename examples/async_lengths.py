"""An asynchronous run whose responses have a heavy tail: nobody waits for the longest, and no length is favoured.

    python async_lengths.py [--mode async] [--steps 128] [--groups 16] [--engines 2] [--slots 32] [--lead 4]

Engines answer prompts, a trainer takes whole groups of four answers. The policy learns to count: the answer to token i
is i + 1, and a response's reward is its share of right tokens. Lengths are lognormal, median 200, and drawn before
anybody answers. A slot of an engine waits `--token-us` for each token, as if another device decoded; a token takes as
long however many slots are busy, which a real engine only comes near to. What ends within 10 ms is finished in one
call. `--rate` is so low that answers of some versions ago teach as much as fresh ones; with a high one they do not, and
`sync` needs fewer steps.

sync   the groups of a version are opened once the trainer has that version (`in_order(0)`)
async  they are opened `--lead` versions ahead, and each is trained on at the version it was opened for
first  whatever is finished first; what is more than `--lead` versions old is dropped, and the lengths are biased
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import transfer_queue as tq

VOCABULARY, SIBLINGS = 16, 4
MEDIAN, SIGMA, SHORTEST, LONGEST = 200, 1.0, 8, 8192
STEP_S = 0.01
PATIENCE_S = 600  # how long one process waits for what another one makes; one that ends is noticed at once
FIELDS = ("questions", "answers", "log_probs")


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.version = 0

    def forward(self, questions: Tensor) -> Tensor:
        """Log-probabilities of the answers to each question."""
        chances: Tensor = self.head(self.words(questions)).log_softmax(-1)
        return chances

    def accuracy(self) -> float:
        """The share of right answers, as an expectation over all questions."""
        with torch.inference_mode():
            return float(self(torch.arange(VOCABULARY)).exp().roll(1, 0).diagonal().mean())


def draw(number: int) -> list[int]:
    """How long the answers to a prompt will be."""
    lengths = np.random.default_rng(number).lognormal(math.log(MEDIAN), SIGMA, SIBLINGS)
    return [int(length) for length in np.clip(np.rint(lengths), SHORTEST, LONGEST)]


def distance(lengths: list[int], others: list[int] | None = None) -> float:
    """The Kolmogorov-Smirnov distance of lengths to others, or to what `draw` draws from."""
    grid = np.arange(SHORTEST, LONGEST + 1)

    def shares(sample: list[int]) -> Any:
        return np.searchsorted(np.sort(sample), grid, side="right") / len(sample)

    if others is not None:
        return float(np.abs(shares(lengths) - shares(others)).max())
    normal = [math.erf((math.log(length + 0.5) - math.log(MEDIAN)) / SIGMA / math.sqrt(2)) for length in grid[:-1]]
    return float(np.abs(shares(lengths) - [*((1 + one) / 2 for one in normal), 1.0]).max())


# an engine


def answer(policy: Policy, number: int, length: int) -> tuple[dict[str, Tensor], float]:
    """One response, and its reward."""
    generator = torch.Generator().manual_seed(number)
    questions = torch.randint(VOCABULARY, (length,), generator=generator)
    with torch.no_grad():
        chances = policy(questions)
    answers = torch.multinomial(chances.exp(), 1, generator=generator)
    row = {"questions": questions, "answers": answers[:, 0], "log_probs": chances.gather(1, answers)[:, 0]}
    return row, float((row["answers"] == (questions + 1) % VOCABULARY).float().mean())


def load(policy: Policy, row: Any) -> None:
    """Give the policy the weights of that row."""
    nn.utils.vector_to_parameters(row["weights"].unbind()[0], policy.parameters())
    policy.version = int(row["version"][0])


class Response(NamedTuple):
    """One that takes until `ends`; `number` is that of its prompt and slot."""

    ends: float
    number: int
    result: Any
    row: dict[str, Tensor]


def begin(policy: Policy, attempt: Any, token_s: float) -> Response:
    number, length = attempt.prompt["number"] * SIBLINGS + attempt.slot, attempt.prompt["lengths"][attempt.slot]
    row, reward = answer(policy, number, length)
    made_by = {"oldest_version": policy.version, "newest_version": policy.version}
    result = attempt.result(reward=reward, tokens=length, **made_by)
    return Response(time.monotonic() + token_s * length, number, result, row)


async def finish(pool: Any, ended: list[Response]) -> None:
    """One put. With `first` the groups of some were dropped meanwhile: these are refused."""
    rows = {name: [one.row[name] for one in ended] for name in FIELDS}
    await pool.async_finish_batch([one.result for one in ended], rows)


async def respond(pool: Any, policy: Policy, slots: int, token_s: float) -> None:
    """Responses in all slots, until no more prompts come. Those that end within `STEP_S` are finished together, and
    the slots that are free are claimed in one call, which waits for prompts while others run."""
    running: list[Response] = []
    claiming: asyncio.Task[Any] | None = None
    looked, comes = 0.0, True
    while comes or running:
        if claiming is None and comes and len(running) < slots:
            claiming = asyncio.create_task(pool.async_claim(slots - len(running), timeout_s=PATIENCE_S))
        left = max(running[0].ends, looked + STEP_S) - time.monotonic() if running else None
        await (asyncio.wait([claiming], timeout=left) if claiming is not None else asyncio.sleep(left or 0.0))
        if claiming is not None and claiming.done():
            attempts, claiming = claiming.result(), None
            comes = bool(attempts)
            if any(policy.version < one.start_version for one in attempts):  # an older group may get newer weights
                load(policy, await tq.async_kv_batch_get("policy", "weights"))
            for attempt in attempts:
                heapq.heappush(running, begin(policy, attempt, token_s))
        if running and time.monotonic() >= max(running[0].ends, looked + STEP_S):
            looked = time.monotonic()
            ended = [heapq.heappop(running) for _ in range(sum(one.ends <= looked for one in running))]
            await finish(pool, ended)


def engine(slots: int, token_s: float, ready: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started this process
    torch.set_num_threads(1)
    tq.init()
    pool, policy = tq.group_pool("train"), Policy()
    ready.wait()
    asyncio.run(respond(pool, policy, slots, token_s))
    tq.close()


# the trainer


def loss_of(policy: Policy, rows: Any, rewards: Tensor) -> Tensor:
    """The clipped surrogate, a mean over all tokens; each row is compared with its siblings."""
    groups = rewards.view(-1, SIBLINGS)
    advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    columns = {name: rows[name].unbind() for name in FIELDS}
    lengths = torch.tensor([len(row) for row in columns["answers"]])
    questions, answers, before = (torch.cat(columns[name]) for name in FIELDS)
    ratio = (policy(questions).gather(1, answers[:, None])[:, 0] - before).exp()
    advantage = advantage.repeat_interleave(lengths)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def publish(policy: Policy, version: int) -> None:
    weights = nn.utils.parameters_to_vector(policy.parameters()).detach()
    tq.kv_put("policy", "weights", {"weights": weights, "version": torch.tensor(version)})


def train(pool: Any, policy: Policy, groups: int, rate: float, goal: float) -> dict[str, Any]:
    """Take steps until no more groups come."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=rate)
    began, waited, reached = time.monotonic(), 0.0, (math.nan, math.nan)
    lengths: list[int] = []
    ages: list[int] = []
    step = 0
    while True:
        asked = time.monotonic()
        batch = pool.select(groups, lease_s=PATIENCE_S, timeout_s=PATIENCE_S)
        waited += time.monotonic() - asked
        if not batch.groups:
            break
        rows = tq.get_client().get_data(batch.metadata)
        loss = loss_of(policy, rows, torch.tensor([reward for group in batch.groups for reward in group.rewards]))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        lengths += [len(row) for row in rows["answers"].unbind()]
        ages += [step - member.oldest_version for group in batch.groups for member in group.members]
        pool.ack(batch, clear=True)
        step += 1
        publish(policy, step)
        pool.advance(step)
        if math.isnan(reached[0]) and policy.accuracy() >= goal:
            reached = time.monotonic() - began, step
    return {
        "steps": step, "seconds": time.monotonic() - began, "waited_s": waited, "reached_s": reached[0],
        "reached_step": reached[1], "accuracy": policy.accuracy(), "lengths": lengths,
        "oldest": max(ages), "age": sum(ages) / len(ages),
    }  # fmt: skip


def prompts(pool: Any, count: int, asked: list[int]) -> None:
    """Open a group for each prompt as soon as the policy lets it through."""
    try:
        for number in range(count):
            (ticket,) = pool.tickets(1, timeout_s=PATIENCE_S)
            lengths = draw(number)
            asked += lengths
            pool.open(f"prompt {number}", SIBLINGS, prompt={"number": number, "lengths": lengths}, ticket=ticket)
    finally:
        pool.end()  # also where that failed: nobody waits for groups that do not come


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


def policy_of(mode: str, groups: int, lead: int) -> tq.GroupPolicy:
    if mode == "first":
        return tq.GroupPolicy(
            serve="window", window=lead, stale="evict", aborts=True, gate=lead, groups_per_version=groups
        )
    return tq.GroupPolicy.in_order(0 if mode == "sync" else lead, groups)


def run(
    mode: str, steps: int, groups: int, engines: int, slots: int, lead: int, token_us: float, rate: float, goal: float
) -> dict[str, Any]:
    """What `train` tells, with the lengths of all answers that were asked for, and what became of the groups."""
    torch.manual_seed(0)
    pool, policy = tq.group_pool("train", policy_of(mode, groups, lead), version=0), Policy()
    publish(policy, 0)
    context = get_context("spawn")
    ready = context.Barrier(engines + 1)
    processes = [
        context.Process(target=engine, args=(slots, token_us / 1e6, ready), name=f"engine {number}", daemon=True)
        for number in range(engines)
    ]
    asked: list[int] = []
    with watched(*processes), ThreadPoolExecutor(1) as thread:
        ready.wait(PATIENCE_S)
        asking = thread.submit(prompts, pool, steps * groups, asked)
        try:
            found = train(pool, policy, groups, rate, goal)
        finally:
            pool.end()  # whoever waits for a ticket now waits in vain
        asking.result()
    counted = pool.status()["sources"][""]
    return found | {"asked": asked, "groups": [counted[name] for name in ("opened", "consumed", "evicted")]}


SETTINGS = {
    "steps": 160, "groups": 16, "engines": 2, "slots": 32, "lead": 4, "token_us": 300.0, "rate": 0.003, "goal": 0.9,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("sync", "async", "first"), default="async")
    for name, default in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tq.init()
    try:
        found = run(**vars(given))
    finally:
        tq.close()
    print(f"{given.mode}: {found['steps']} steps in {found['seconds']:.1f} s, {given.goal:.0%} right after "
          f"{found['reached_s']:.1f} s (step {found['reached_step']}), {found['accuracy']:.1%} at the end; "
          f"the trainer waited {found['waited_s']:.1f} s")  # fmt: skip
    opened, consumed, evicted = found["groups"]
    print(f"groups: {opened} opened, {consumed} consumed, {evicted} evicted; "
          f"weights {found['age']:.1f} versions old, {found['oldest']} at most")  # fmt: skip
    lengths, asked = found["lengths"], found["asked"]
    print(f"lengths of {len(lengths)} answers: mean {np.mean(lengths):.1f}, of all {np.mean(asked):.1f}; KS distance "
          f"{distance(lengths, asked):.4f} to all, {distance(lengths):.4f} to their distribution")  # fmt: skip


if __name__ == "__main__":
    main()
