"""GRPO on one machine: rollout, reward, reference and trainer processes that share only `transfer_queue`.

Run `python -m demo`. Who writes and who reads what:

    partition   row            written by                       read by
    prompts     one prompt     trainer, at most `max_lag` + 1   rollout workers, whoever is free
                               batches ahead of training
    train_<k>   one sample     rollout: prompt, response, ...   reward, reference, trainer: each row once per task,
                               reward: reward                   when the fields it needs are there
                               reference: ref_log_probs
    weights     one version    trainer                          rollout workers, the reference worker
    status, metrics, spans     every worker                     the parent, which only watches
"""
