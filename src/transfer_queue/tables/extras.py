"""The packages of the extras `arrow`, `parquet` and `sql`."""

from __future__ import annotations

import importlib

from transfer_queue.errors import NotSupported

PACKAGES = {"arrow": ("pyarrow",), "parquet": ("pyarrow", "polars"), "sql": ("pyarrow", "duckdb")}


def require(extra: str, what: str) -> None:
    """Raises `NotSupported`, which names the extra, where a package that `what` needs is not installed."""
    for name in PACKAGES[extra]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise NotSupported(
                f"{what} needs {error.name}, which is not installed: pip install 'transfer-queue[{extra}]'"
            ) from None
