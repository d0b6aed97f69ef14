"""GRPO on one machine: rollout, reward, reference and trainer processes that share only `transfer_queue`.

Run `python -m demo`. Who writes and who reads what:

    partition   row            written by                       read by
    prompts     one prompt     trainer                          rollout workers, whoever is free and admitted
    train_<k>   one sample     rollout: prompt, response, ...   reward, reference, trainer: each row once per task,
                               reward: reward                   when the fields it needs are there
                               reference: ref_log_probs
    weights     the first      trainer                          the reference worker
    replicas    an address     rollout workers                  trainer
    status, metrics, spans     every worker                     the parent, which only watches

Every version of the policy goes to the rollout workers by `transfer_queue.weights`, also between two tokens of a
sample. The queue sees to it that no sample is used more than `max_lag` versions late: producers are admitted, the
trainer asks for no older ones.
"""
