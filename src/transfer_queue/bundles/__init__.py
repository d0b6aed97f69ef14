"""What a task took for a step of its loop, as files that need no service: to look at, and to train on once more.

bundle    the directory: which files there are, that they are whole, and the batches in them
columns   a column as safetensors and back, bit for bit
"""

from transfer_queue.bundles.bundle import Bundle, rows_of, save, taken

__all__ = ["Bundle", "rows_of", "save", "taken"]
