"""Blocks in shared memory.

    Unit          blocks, pins, sessions, the byte budget and requests that wait for it
     └─ Arena     one memory file, mapped once by every client
         └─ Extents   which bytes of it are free (pure)

`Unit` knows nothing of rows or sockets: the server tells it which blocks the controller no longer needs.
"""
