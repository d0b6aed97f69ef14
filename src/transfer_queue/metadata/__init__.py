"""What a batch is, apart from its data: row ids, partition, field schema, readiness, tags and keys.

batch             BatchMeta: the rows of a batch
 ├─ contents      what it holds: arrays and shared dicts inside, lists on access
 ├─ columns       tags and keys, shared by slices until one of them changes
 └─ views         single rows, read only
kv                KVBatchMeta: the rows of a batch, named by keys
fields            the field schema, from dicts and to them
merge             joining dicts without losing a conflict
"""

from transfer_queue.metadata.batch import BatchMeta
from transfer_queue.metadata.kv import KVBatchMeta

__all__ = ["BatchMeta", "KVBatchMeta"]
