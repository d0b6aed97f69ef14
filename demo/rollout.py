"""Rollout workers: take prompts, sample answers with the weights there are, add them as rows."""

from __future__ import annotations

import sys
import time
from collections import Counter

import torch
from torch import Tensor

from demo.arithmetic import MAX_RESPONSE_LEN, PROMPT_LEN
from demo.columns import inside, padded, ragged
from demo.model import Generation
from demo.port import Doing, Port, Rows
from demo.replica import Replica
from demo.settings import Settings
from demo.tables import REPLICAS, STOP, Tags, train_partition
from transfer_queue.errors import DeadlineExceeded
from transfer_queue.weights import Spans

_SWITCH_S = 0.0005  # how long the thread that generates keeps the one that takes weights waiting
_GLANCE_S = 0.5
_LIVES = 7919  # apart are the seeds of a worker's processes
_STEPS, _GROUPS = 1_000_003, 10_007  # at most of these, for seeds of their own


def run(worker: str, settings: Settings) -> None:
    """Serve tickets until the trainer hands out stop tickets."""
    sys.setswitchinterval(_SWITCH_S)
    port = Port(worker, settings)
    seed = settings.seed * 1000 + int(worker.split()[1]) + _LIVES * port.life
    generator = torch.Generator().manual_seed(seed)
    with Replica(settings.shape, settings.token, settings.run_id) as replica:
        port.tell(REPLICAS, worker, address=replica.address)
        while (ticket := _next_ticket(port, settings)) is not None:
            _serve(port, replica, generator, ticket, settings)
        pauses = replica.control
        port.report_last(paused_s=pauses.total_pause_s, longest_pause_s=pauses.longest_pause_s)


def _next_ticket(port: Port, settings: Settings) -> Rows | None:
    """Prompts; None when there will be no more. A stop ticket is not acknowledged: it goes to the next when this one
    leaves."""
    ticket = port.take("prompts", ["prompt"], settings.prompts_per_ticket)
    return None if ticket is None or STOP in ticket.tag("step") else ticket


def _wait_for_weights(port: Port, replica: Replica, version: int, settings: Settings) -> None:
    """Block until these are here, or newer ones: this worker may be new, or have missed some. Raises
    `DeadlineExceeded`."""
    deadline = time.monotonic() + settings.patience_s
    while not replica.control.wait_for(version, 0):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"no weights of version {version} in {settings.patience_s} s")
        with port.spending(Doing.WAIT):
            replica.control.wait_for(version, _GLANCE_S)
        port.report()


def _serve(port: Port, replica: Replica, generator: torch.Generator, ticket: Rows, settings: Settings) -> None:
    """Make the samples of a ticket, and add them as one row each to the partition of the step their prompt is for.

    The weights have to be so new that no sample is more than `max_lag` versions old when it is trained on: step `s`
    leads to version `s + 1`. The trainer asks for no further steps than those that the newest weights may be used for.

    The ticket is acknowledged after that. Who is killed in between leaves it to another worker, which finds the rows.
    """
    n = settings.samples_per_prompt
    by_step = {step: _unanswered(port, ticket, step) for step in sorted(set(ticket.tag("step")))}
    numbers = ticket.tag("number")
    wanted = [place for places in by_step.values() for place in places]
    if wanted:
        _wait_for_weights(port, replica, settings.weights_for(max(by_step)), settings)
        start = time.monotonic()
        with port.spending(Doing.WORK):
            prompts = padded(ticket.data["prompt"], PROMPT_LEN)[wanted].repeat_interleave(n, dim=0)
            made, spans = _sample(replica, prompts, _draws(ticket, wanted, generator, settings), settings)
        for frozen in replica.pauses_within(start, time.monotonic()):
            port.account(Doing.WEIGHTS, *frozen, instead_of=Doing.WORK)
        port.pass_by("made", max(by_step))
        first = 0
        for step, places in by_step.items():  # the next ready prompts may belong to two steps
            rows = slice(first * n, (first + len(places)) * n)
            _add(port, step, [numbers[place] for place in places], prompts[rows], _part(made, rows), spans)
            first += len(places)
    port.acknowledge(ticket)
    port.drop(ticket)
    port.finish(len(wanted) * n)


def _draws(
    ticket: Rows, wanted: list[int], generator: torch.Generator, settings: Settings
) -> list[tuple[int, torch.Generator]]:
    """(prompts, generator) of what is sampled together, in order. What a worker gets with a ticket is chance, groups of
    prompts are not: where a run is to be reproducible each has a seed of its own."""
    if not settings.reproducible:
        return [(len(wanted), generator)]
    steps, numbers = ticket.tag("step"), ticket.tag("number")
    groups = Counter((steps[place], numbers[place] // settings.samples_per_prompt) for place in wanted)
    return [
        (count, torch.Generator().manual_seed((settings.seed * _STEPS + step) * _GROUPS + group))
        for (step, group), count in groups.items()
    ]


def _sample(
    replica: Replica, prompts: Tensor, draws: list[tuple[int, torch.Generator]], settings: Settings
) -> tuple[Generation, Spans]:
    """Answers to all prompts. Several draws have the same weights: there are no newer ones before all are used."""
    parts = prompts.split([count * settings.samples_per_prompt for count, _ in draws])
    found = [replica.generate(part, settings.temperature, one) for part, (_, one) in zip(parts, draws, strict=True)]
    made = [one for one, _ in found]
    whole = Generation(
        tokens=torch.cat([one.tokens for one in made]),
        log_probs=torch.cat([one.log_probs for one in made]),
        lengths=torch.cat([one.lengths for one in made]),
    )
    return whole, found[0][1]


def _unanswered(port: Port, ticket: Rows, step: int) -> list[int]:
    """Which prompts of a ticket have no samples yet. All have when a worker was killed after it had added them; then
    the step may even be over."""
    partition = train_partition(step)
    if port.notes(partition) is None:
        return []
    numbers = ticket.tag("number")
    mine = {f"{numbers[place]}/0": place for place, one in enumerate(ticket.tag("step")) if one == step}
    there = port.known(partition, list(mine))
    return [place for key, place in mine.items() if key not in there]


def _part(made: Generation, rows: slice) -> Generation:
    return Generation(tokens=made.tokens[rows], log_probs=made.log_probs[rows], lengths=made.lengths[rows])


def _add(port: Port, step: int, numbers: list[int], prompts: Tensor, made: Generation, spans: Spans) -> None:
    if not numbers:
        return
    n = len(prompts) // len(numbers)
    rows = [(number, sample) for number in numbers for sample in range(n)]
    tags: list[Tags] = [
        {"group_id": number, **spans.tag(length)}
        for (number, _), length in zip(rows, made.lengths.tolist(), strict=True)
    ]
    mask = inside(made.lengths, MAX_RESPONSE_LEN).to(torch.int64)
    port.add(
        train_partition(step),
        [f"{number}/{sample}" for number, sample in rows],
        tags,
        prompt=prompts,
        response=ragged(made.tokens, made.lengths),
        response_mask=ragged(mask, made.lengths),
        rollout_log_probs=ragged(made.log_probs, made.lengths),
    )
