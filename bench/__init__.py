"""Measures this package beside TransferQueue 0.1.11 and Ray's object store, interleaved in one run.

`python -m bench` is the driver: it imports neither torch nor ray. For every system it starts a writer and a reader
process (`agent.py`, with that system's own interpreter), sends them one JSON command a line and reads one JSON answer a
line. `cases/` says what is measured and against which target, `ops/` is the code that runs inside the agents.
"""
