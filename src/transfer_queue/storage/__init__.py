"""Where the bytes of rows live.

    blocks      the books: which block is whose, how many pins it has, the byte budget and who waits for it
    pins        who reads which blocks
    shm         the memory of one host: arenas that its clients map
    extents     which ranges of an arena are free
    engines     other programs that keep the bytes of large blocks
    transports  how bytes of arenas travel to other hosts, where that is not over the service's connections
    plugins     classes of both that a name leads to
    host_facts  what a host has that either may use
    in_time     calls of other people's libraries that end in time

The compatibility name `StorageKeyNotFoundError` is importable from
here.
"""

from transfer_queue.errors import StorageKeyNotFoundError as StorageKeyNotFoundError
