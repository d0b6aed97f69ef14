"""What a host has that an engine or a transport may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

RDMA = "/sys/class/infiniband"


def rdma_devices(root: str = RDMA) -> list[str]:
    """Each port of each RDMA device with its state, as the kernel says it: `mlx5_0:1 ACTIVE`."""
    found = []
    for device in sorted(Path(root).iterdir()) if os.path.isdir(root) else []:
        states = []
        for port in sorted((device / "ports").glob("*")):
            with contextlib.suppress(OSError):  # it was taken out meanwhile
                states.append(f"{device.name}:{port.name} {(port / 'state').read_text().strip().partition(': ')[2]}")
        found += states or [device.name]
    return found


def free_nbytes() -> int:
    """The memory that nobody uses."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
