"""Versions in a folder that all sites reach: an object store, or whatever else fsspec opens.

writing   `ArchiveReceiver` takes part in a trainer's updates as a replica does, and writes what it is given
folder    `Archive` is the folder: a file for each bucket, and one for each manifest, which comes last
reading   `ArchiveSource` follows the newest version elsewhere, as a source of weights for the servers there

Nothing passes between sites but files. Differences stay differences: a site fetches what changed, and checks what that
leads to as a receiver does.
"""

from transfer_queue.weights.archive.folder import Archive
from transfer_queue.weights.archive.reading import ArchiveSource
from transfer_queue.weights.archive.writing import ArchiveReceiver

__all__ = ["Archive", "ArchiveReceiver", "ArchiveSource"]
