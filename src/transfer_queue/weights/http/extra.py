"""What the extra `http` brings."""

from __future__ import annotations


def lacking(error: ModuleNotFoundError) -> ImportError:
    """What to raise when a module of the extra is not there."""
    return ImportError(
        f"serving weights over HTTP needs {error.name}, which is not installed: pip install 'transfer-queue[http]' "
        "(WeightSyncClient works without it)",
        name=error.name,
    )
