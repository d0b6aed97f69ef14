"""GRPO on one machine: rollout, reward, reference and trainer processes that share only `transfer_queue`.

Run `python -m demo`. Who writes and who reads what:

    partition   row            written by                       read by
    prompts     one prompt     trainer                          rollout workers, whoever is free
    train_<k>   one sample     rollout: prompt, response, ...   reward, reference, trainer: each row once per task,
                               reward: reward                   when the fields it needs are there
                               reference: ref_log_probs
    weights     the first      trainer                          the reference worker
    replicas    an address     rollout workers                  trainer
    status, metrics, spans     every worker                     the parent, which only watches

Every version of the policy goes to the rollout workers by `transfer_queue.weights`, also between two tokens of a
sample. No sample is used more than `max_lag` versions late: the trainer asks for samples of so many steps ahead and
takes none that is older, and rollout workers wait for weights that are new enough.

Any worker may be killed (kill -9). The parent starts another one in its place; rows are on lease until what they were
taken for cannot be undone, so they are delivered again; the trainer goes on from its last step, which it saves beside
the run before it acknowledges the rows and announces the weights. `python -m demo --chaos` kills one of each kind.
What a dead worker had on lease says the service (`overview().departures`).
The service may be killed, too: it has a standby, and nobody has to do anything. `--kill-service 20` does it every 20 s.
"""
