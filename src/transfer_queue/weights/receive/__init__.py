"""A process that takes versions and makes them live, all or nothing. It asks nobody and opens no socket.

receiver         open, stage, verify, commit; what is installed; who may read
update_session   the one open update: whose it is, how far it has come, until when it may go on
staging          the buckets that have arrived, each checked, in memory of its own
results          what a difference leads to, from what is live and what has come
compatibility    whether a version fits a model
targets          how tensors become the live ones: copied in place, swapped in, or by changing modules
slots            what the module's places have once a version is committed, whatever forward passes put there
stand_ins        new memory for many tensors with a short pause
lazy             tensors that are not there: what a loader takes of them, and loading from just that
lock             many readers or one writer
adapters         LoRA adapters, which forward passes choose by label
gate, pauses     where requests pass, so that generation can be paused; whose pause it is
checker          digests of what is live, to compare servers
status           what a server says about itself
"""
