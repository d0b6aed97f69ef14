"""Pickle, for values the safe codec cannot hold: only where this process itself set `client.allow_pickle`.

Writer and reader each choose, by their own setting or TQ_ALLOW_PICKLE; what the service was started with never counts.
The only place of the package that unpickles. Servers store these bytes and never import this module.
"""

from __future__ import annotations

import pickle
from typing import Any


def dump(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def load(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301  the reader opted in for exactly this
