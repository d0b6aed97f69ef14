"""Rollout workers: take prompts, sample answers with the newest weights, add them as rows."""

from __future__ import annotations

import torch
from torch import Tensor

from demo.arithmetic import MAX_RESPONSE_LEN, PROMPT_LEN
from demo.columns import inside, padded, ragged
from demo.model import Generation, Policy, generate, unflatten
from demo.port import Doing, Port, Rows
from demo.settings import Settings
from demo.tables import STOP, Tags, newest_version, train_partition, weights_key


def run(worker: str, settings: Settings) -> None:
    """Serve tickets until the trainer hands out stop tickets.

    A ticket for step k is put after version k - max_lag is, and the newest version is used: so no sample is older than
    `max_lag` versions when it is trained on.
    """
    port = Port(worker, settings)
    policy = Policy(settings.shape)
    generator = torch.Generator().manual_seed(settings.seed * 1000 + int(worker.split()[1]))
    version = -1
    while True:
        ticket = port.take("prompts", ["prompt"], settings.prompts_per_ticket)
        port.drop(ticket)
        if STOP in ticket.tag("step"):
            break
        newest = newest_version(port.tags("weights"))
        if newest != version:
            unflatten(policy, port.read("weights", weights_key(newest), "parameters"))
            version = newest
        with port.spending(Doing.WORK):
            prompts = padded(ticket.data["prompt"], PROMPT_LEN).repeat_interleave(settings.samples_per_prompt, dim=0)
            made = generate(policy, prompts, settings.temperature, generator)
        _add(port, ticket, prompts, made, version, settings)
    port.report()


def _add(port: Port, ticket: Rows, prompts: Tensor, made: Generation, version: int, settings: Settings) -> None:
    """One row per sample, into the partition of the step that each prompt is for."""
    n = settings.samples_per_prompt
    steps = torch.tensor(ticket.tag("step")).repeat_interleave(n)
    numbers = torch.tensor(ticket.tag("number")).repeat_interleave(n)
    tags: list[Tags] = [{"group_id": number, "version": version} for number in numbers.tolist()]
    keys = [f"{number}/{row % n}" for row, number in enumerate(numbers.tolist())]
    mask = inside(made.lengths, MAX_RESPONSE_LEN).to(torch.int64)
    for step in sorted(set(ticket.tag("step"))):  # the next ready prompts may belong to two steps
        rows = (steps == step).nonzero().squeeze(1)
        lengths = made.lengths[rows]
        port.add(
            train_partition(step),
            [keys[row] for row in rows.tolist()],
            [tags[row] for row in rows.tolist()],
            prompt=prompts[rows],
            response=ragged(made.tokens[rows], lengths),
            response_mask=ragged(mask[rows], lengths),
            rollout_log_probs=ragged(made.log_probs[rows], lengths),
        )
        port.finish(len(rows))
