"""Torch datasets over a partition that others are still filling.

replays                           the same out of a bundle, without a service
streams                           one line over the rest; AsyncStream fetches on the running event loop
streaming_dataloader              torch's DataLoader; with workers, the parent acknowledges what was used
 └─ streaming_dataset             batches, split into micro-batches; knows what is in the consumer's hands
     ├─ feed                      fetches ahead in one thread and keeps leases alive
     │   └─ lease_owner           the session that holds the leases: they end with it
     ├─ work                      what one process has of a stream: in a forked child it is still the parent's
     ├─ chunking                  a batch and its metadata as micro-batches
     └─ acks                      which rows are used once a micro-batch is
ranks                             which data-parallel rank a stream is for
worker_feed                       what a loader tells its workers, and whose turn it is to fetch
handing_over                      the shared memory that brings batches from a worker to the loader
parent                            workers end with the process that started them
"""

from transfer_queue.dataloader.replays import BundleStream, replay
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset
from transfer_queue.dataloader.streams import AsyncStream, Stream, async_stream, stream

__all__ = [
    "AsyncStream", "BundleStream", "Stream", "StreamingDataLoader", "StreamingDataset", "async_stream", "replay",
    "stream",
]  # fmt: skip
