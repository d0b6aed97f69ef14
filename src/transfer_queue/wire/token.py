"""Tokens: where they are read, and what is refused as one."""

from __future__ import annotations

import os
import stat

from transfer_queue.errors import ConfigError

MIN_TOKEN_LENGTH = 16


def token_from_environment(name: str = "TQ_TOKEN") -> str:
    """The token in the variable `name`, else in the file that `name`_FILE names; "" where neither is set.

    Raises `ConfigError`, also for a file that cannot be read or that others may read.
    """
    token = os.environ.get(name, "")
    if token:
        return checked_token(token, name)
    path = os.environ.get(f"{name}_FILE", "")
    return token_from_file(path, f"{name}_FILE") if path else ""


def token_from_file(path: str, name: str) -> str:
    """The token in a file; `name` is the setting that names it. Raises `ConfigError`."""
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: no token can be read from {path}: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{name}: others may read or change the token in {path} (mode {mode:o}): chmod 600 {path}")
    return checked_token(token, f"{name}: {path}")


def checked_token(token: str, name: str) -> str:
    """`token`, of the setting or argument `name`. Raises `ConfigError` for one that can be guessed."""
    if len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"{name}: a token of {len(token)} characters can be guessed; take {MIN_TOKEN_LENGTH} or more at random, "
            "as of `openssl rand -hex 32`"
        )
    return token
