"""Texts of anybody's as they may be shown: nothing in them acts on a screen, and they are not long."""

from __future__ import annotations

from hashlib import blake2b

MAX_NAME = 120  # characters
MAX_TEXT = 2048


def printable(text: str, most: int = MAX_NAME) -> str:
    """`text` with what is not printable written out, cut to about `most` characters."""
    shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text[:most])
    return f"{shown}… ({len(text):,} characters)" if len(text) > most else shown


def lines(text: str, most: int = MAX_TEXT) -> str:
    """As `printable`, but lines stay lines."""
    shown = "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text[:most])
    return f"{shown}…" if len(text) > most else shown


def ident(name: str) -> str:
    """What stands for a name of any length in a request."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
