"""Which name was probably meant where one is not known."""

from __future__ import annotations

import difflib
import heapq
import itertools
import math
import re
from collections.abc import Iterable

LOOKED_AT = 200  # this is done while others wait for the server
COMPARED, MAX_LENGTH = 8, 100
SLIPS = 0.2  # of the length
MAX_APART = 12  # characters from the first difference to the last
TOKENS = re.compile(r"\d+|[^\W\d_]+")


def near(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` is probably a slip for, or None; looks at the first `LOOKED_AT`.

    Names that differ only in numbers or in single letters are no slips: train_1 and train_2.
    """
    if len(name) > MAX_LENGTH:
        return None
    letters = set(name)

    def difference(other: str) -> int:
        """A bound that costs little: what is compared in earnest are the few best."""
        return abs(len(name) - len(other)) + len(letters.symmetric_difference(other))

    looked_at = [one for one in itertools.islice(known, LOOKED_AT) if len(one) <= MAX_LENGTH]
    best = heapq.nsmallest(COMPARED, looked_at, difference)
    slips = [(_distance(name, one), one) for one in best if not _numbered_alike(name, one)]
    few = [(count, one) for count, one in slips if count <= SLIPS * max(len(name), len(one))]
    return min(few)[1] if few else None


def _distance(one: str, other: str) -> float:
    """How many slips make one into the other: a character too many, too few, a wrong one, or two exchanged.

    The restricted edit distance (optimal string alignment) of what is between the first and the last difference.
    """
    start = _common(one, other)
    one, other = one[start:], other[start:]
    end = _common(one[::-1], other[::-1])
    one, other = one[: len(one) - end], other[: len(other) - end]
    if max(len(one), len(other)) > MAX_APART:
        return math.inf
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, mine in enumerate(one, 1):
        row = [i]
        for j, its in enumerate(other, 1):
            least = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (mine != its))
            if i > 1 and j > 1 and mine == other[j - 2] and one[i - 2] == its:
                least = min(least, before[j - 2] + 1)
            row.append(least)
        before, last = last, row
    return last[-1]


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in alike)


def hint(name: str, known: Iterable[str]) -> str:
    """ "; the nearest is 'x'", or nothing where none is near."""
    found = near(name, known)
    return "" if found is None else f"; the nearest is {found!r}"


def unknown_partition(name: str, known: Iterable[str]) -> str:
    """That there is no such partition, with the name that was meant, or how to find it."""
    return f"partition {name!r:.200} does not exist{hint(name, known) or ': `tq ls` shows those that do'}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar one, however far it is; `known` has some."""
    return difflib.get_close_matches(name[:MAX_LENGTH], list(known), 1, 0.0)[0]


def _numbered_alike(one: str, other: str) -> bool:
    """Whether both have the same words, with other numbers or single letters among them."""
    if one == other:
        return True
    mine, its = TOKENS.findall(one), TOKENS.findall(other)
    return mine != its and _words(mine) == _words(its)


def _words(tokens: list[str]) -> list[str]:
    return [token for token in tokens if len(token) > 1 and not token.isdigit()]
