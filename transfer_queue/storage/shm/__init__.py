"""Blocks in shared memory.

    unit              blocks, sessions, the byte budget and requests that wait for it
     ├─ pins          who reads which blocks
     └─ arena         one memory file, mapped once by every client
         └─ extents   which bytes of it are free (pure)

`Unit` knows nothing of rows or sockets: the server tells it which blocks the controller no longer needs.
"""
