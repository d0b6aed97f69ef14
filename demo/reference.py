"""The reference worker: log-probabilities of the sampled tokens under the model of the warm start."""

from __future__ import annotations

import torch

from demo.arithmetic import END, MAX_RESPONSE_LEN, PROMPT_LEN
from demo.columns import padded, ragged, row_lengths
from demo.model import Policy, response_log_probs, unflatten
from demo.port import Doing, Port
from demo.settings import Settings
from demo.tables import REFERENCE, train_partition


def run(worker: str, settings: Settings) -> None:
    """Fill in `ref_log_probs`, ragged like the response, of every row of every step."""
    port = Port(worker, settings)
    policy = Policy(settings.shape)
    loaded = False
    for step in range(settings.steps):
        for _ in range(0, settings.rows_per_step, settings.rows_per_read):
            rows = port.take(train_partition(step), ["prompt", "response"], settings.rows_per_read)
            if not loaded:  # samples exist, so the weights that they came from do
                unflatten(policy, port.read("weights", REFERENCE, "parameters"))
                loaded = True
            with port.spending(Doing.WORK), torch.inference_mode():
                lengths = row_lengths(rows.data["response"])
                prompts = padded(rows.data["prompt"], PROMPT_LEN)
                responses = padded(rows.data["response"], MAX_RESPONSE_LEN, fill=END)
                log_probs = response_log_probs(policy, prompts, responses)
            port.fill(rows, ref_log_probs=ragged(log_probs, lengths))
            port.finish(len(rows))
    port.report()
