"""`get_logger`, for programs that import TransferQueue's."""

from __future__ import annotations

import logging
import os

FORMAT = "%(asctime)s - %(levelname)s - %(name)s - %(message)s"


def get_logger(name: str | None, default_level: str = "WARNING") -> logging.Logger:
    """The logger `name` at the level that TQ_LOGGING_LEVEL names, else at `default_level`.

    It gets a handler for standard error where neither it nor a logger above it has one, as in a worker of Ray. Raises
    ValueError for a level that does not exist.
    """
    logger = logging.getLogger(name)
    logger.setLevel((os.environ.get("TQ_LOGGING_LEVEL") or default_level).upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
    return logger
