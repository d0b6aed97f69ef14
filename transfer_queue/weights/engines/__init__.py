"""Engines bring versions from a trainer to receivers; `registry` has them: shm, tcp, disk, collective, cuda_ipc.

TrainerEngine  trainer_init, send_weights: packs the source, publishes it, leads the receivers through the update
 └─ Client     the control plane: init, start, update, finish, to every receiver
     └─ Engine  the same four calls at a receiver: fetches, stages, verifies, commits
"""
