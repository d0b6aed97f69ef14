"""Where the bytes of rows live.

    shm    the store of one host: arenas of shared memory that local clients map

Distributed engines get a module each beside it.
The compatibility name `StorageKeyNotFoundError` is importable from here.
"""

from transfer_queue.errors import StorageKeyNotFoundError as StorageKeyNotFoundError
