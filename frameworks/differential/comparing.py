"""The places in which two outcomes differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where two outcomes differ, as the keys that lead there, and what stands there in each."""

    path: tuple[str | int, ...]
    theirs: Any
    ours: Any


def places(theirs: Any, ours: Any, path: tuple[str | int, ...] = ()) -> Iterator[Place]:
    """Every innermost place in which they differ. Where both raise, ours has to be caught by whoever catches theirs."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and "raises" in theirs and "raises" in ours:
        if theirs["raises"][0] not in ours["raises"]:
            yield Place((*path, "raises"), theirs["raises"], ours["raises"])
        if not set(theirs["texts"]) <= set(ours["texts"]):
            yield Place((*path, "texts"), theirs["texts"], ours["texts"])
        theirs, ours = ({k: v for k, v in one.items() if k not in ("raises", "texts")} for one in (theirs, ours))
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        for key in theirs:
            yield from places(theirs[key], ours[key], (*path, key))
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            yield from places(one, other, (*path, number))
    elif theirs != ours:
        yield Place(path, theirs, ours)
