"""What a batch is, apart from its data: row ids, partition, field schema, readiness, tags and keys."""

from transfer_queue.metadata.batch import BatchMeta
from transfer_queue.metadata.kv import KVBatchMeta

__all__ = ["BatchMeta", "KVBatchMeta"]
