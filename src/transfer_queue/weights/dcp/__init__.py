"""Versions as checkpoints: `torch.distributed.checkpoint` reads them into any mesh, and writes them.

reader   `VersionReader`: a version's folder, or a running trainer
writer   `VersionWriter`: one version of what all ranks hold
origins  where a reader's version comes from

Only tensors are read and written. Nothing that lies in a folder, or comes from a trainer, is unpickled.
"""

from transfer_queue.weights.dcp.reader import VersionReader
from transfer_queue.weights.dcp.writer import VersionWriter

__all__ = ["VersionReader", "VersionWriter"]
