"""Rollout workers: take prompts, sample answers with the weights there are, add them as rows."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from demo.arithmetic import MAX_RESPONSE_LEN, PROMPT_LEN
from demo.columns import inside, padded, ragged
from demo.model import Generation
from demo.port import Doing, Port, Rows
from demo.replica import Replica
from demo.settings import Settings
from demo.tables import REPLICAS, STOP, Tags, train_partition
from transfer_queue.weights import Spans

_SWITCH_S = 0.0005  # how long the thread that generates keeps the one that takes weights waiting


def run(worker: str, settings: Settings) -> None:
    """Serve tickets until the trainer hands out stop tickets.

    Every ticket waits until the queue admits its samples, so none is more than `max_lag` versions old when it is
    trained on. Admission is for one less, as a version is announced before it is here.
    """
    sys.setswitchinterval(_SWITCH_S)
    port = Port(worker, settings)
    generator = torch.Generator().manual_seed(settings.seed * 1000 + int(worker.split()[1]))
    with Replica(settings.shape, settings.token) as replica:
        port.tell(REPLICAS, worker, address=replica.address)
        while True:
            port.admit("trainer", settings.rows_per_ticket, settings.max_lag - 1, settings.rows_per_step)
            ticket = port.take("prompts", ["prompt"], settings.prompts_per_ticket)
            port.drop(ticket)
            if STOP in ticket.tag("step"):
                break
            with port.spending(Doing.WORK):
                prompts = padded(ticket.data["prompt"], PROMPT_LEN)
                prompts = prompts.repeat_interleave(settings.samples_per_prompt, dim=0)
                made, spans = replica.generate(prompts, settings.temperature, generator)
            _add(port, ticket, prompts, made, spans, settings)
        pauses = replica.control
        port.report(paused_s=pauses.total_pause_s, longest_pause_s=pauses.longest_pause_s)


def _add(port: Port, ticket: Rows, prompts: Tensor, made: Generation, spans: Spans, settings: Settings) -> None:
    """One row per sample, into the partition of the step that each prompt is for."""
    n = settings.samples_per_prompt
    steps = torch.tensor(ticket.tag("step")).repeat_interleave(n)
    numbers = torch.tensor(ticket.tag("number")).repeat_interleave(n)
    tags: list[Tags] = [
        {"group_id": number, **spans.tag(length)}
        for number, length in zip(numbers.tolist(), made.lengths.tolist(), strict=True)
    ]
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
