"""The reference worker: what the model of the warm start would have said instead of each sampled token."""

from __future__ import annotations

import torch

from demo.arithmetic import END, MAX_RESPONSE_LEN, PROMPT_LEN
from demo.columns import padded, ragged, row_lengths
from demo.model import Policy, token_log_probs, unflatten
from demo.port import Doing, Port
from demo.settings import Settings
from demo.stream import samples
from demo.tables import REFERENCE


def run(worker: str, settings: Settings) -> None:
    """Fill in `ref_log_probs` of every row of every step: ragged like the response, for each of its tokens the
    log-probabilities of the whole vocabulary, which is small here.
    """
    port = Port(worker, settings)
    policy = Policy(settings.shape)
    loaded = False
    for rows in samples(port, settings, ["prompt", "response"]):
        if not loaded:  # samples exist, so the weights that they came from do
            unflatten(policy, port.read("weights", REFERENCE, "parameters"))
            loaded = True
        with port.spending(Doing.WORK), torch.inference_mode():
            lengths = row_lengths(rows.data["response"])
            prompts = padded(rows.data["prompt"], PROMPT_LEN)
            responses = padded(rows.data["response"], MAX_RESPONSE_LEN, fill=END)
            log_probs = token_log_probs(policy, prompts, responses)
        port.answer(rows, ref_log_probs=ragged(log_probs, lengths))
        port.finish(len(rows))
    port.report_last()
