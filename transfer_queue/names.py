"""Which name was probably meant where one is not known."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable

LOOKED_AT = 200  # this is done while others wait for the server
CUTOFF = 0.8
TOKENS = re.compile(r"\d+|[^\W\d_]+")


def near(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` is probably a slip for, or None; looks at the first `LOOKED_AT`.

    Names that differ only in numbers or in single letters are no slips: train_1 and train_2.
    """
    others = [one for one in itertools.islice(known, LOOKED_AT) if not _numbered_alike(name, one)]
    found = difflib.get_close_matches(name, others, 1, CUTOFF)
    return found[0] if found else None


def hint(name: str, known: Iterable[str]) -> str:
    """ "; the nearest is 'x'", or nothing where none is near."""
    found = near(name, known)
    return "" if found is None else f"; the nearest is {found!r}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar one, however far it is; `known` has some."""
    return difflib.get_close_matches(name, list(known), 1, 0.0)[0]


def _numbered_alike(one: str, other: str) -> bool:
    """Whether both have the same words, with other numbers or single letters among them."""
    if one == other:
        return True
    mine, its = TOKENS.findall(one), TOKENS.findall(other)
    return mine != its and _words(mine) == _words(its)


def _words(tokens: list[str]) -> list[str]:
    return [token for token in tokens if len(token) > 1 and not token.isdigit()]
