"""What a seed stands for: a program about one of these topics."""

from __future__ import annotations

import random

from frameworks.differential.clients import OfClients
from frameworks.differential.drawing import Drawing, Program
from frameworks.differential.refusals import OfRefusals
from frameworks.differential.sampling import OfSamplers
from frameworks.differential.streaming import OfStreams

TOPICS: dict[str, type[Drawing]] = {
    "columns": Drawing, "refusals": OfRefusals, "samplers": OfSamplers, "streams": OfStreams, "clients": OfClients,
}  # fmt: skip
SHARES = ("columns", "refusals", "samplers", "columns", "streams", "clients")


def draw(seed: int, topic: str | None = None) -> Program:
    """5 to 20 steps, most of them one call, about `topic`. The same seed gives the same program."""
    topic = topic or SHARES[seed % len(SHARES)]
    kind, rng = TOPICS[topic], random.Random(seed)
    sampler = rng.choice(kind.samplers)
    drawn = kind(rng, sampler[0])
    for _ in range(rng.randrange(5, 21)):
        drawn.step()
    return Program(seed, topic, sampler, drawn.calls)
