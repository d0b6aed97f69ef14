"""Pickle, for values the safe codec cannot hold: only where this process itself set `client.allow_pickle`.

Writer and reader each choose, by their own setting or TQ_ALLOW_PICKLE; what the service was started with never counts.
The only place of the package that unpickles. Servers store these bytes and never import this module.
"""

from __future__ import annotations

import pickle
from typing import Any

from transfer_queue.errors import UnsupportedValue


def dump(value: Any) -> bytes:
    """Raises `UnsupportedValue` for what pickle cannot hold either."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UnsupportedValue(f"a value of type {name} cannot be pickled: {error}") from None


def load(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301  the reader opted in for exactly this
