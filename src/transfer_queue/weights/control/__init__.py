"""The calls that a trainer may make to a server of weights.

control         in the server's process
control_async   the same for an event loop
"""
