"""Parts of other frameworks that run ours.

loggers        counts and sizes of the service in the log of a training run: wandb, TensorBoard
verl_replay    verl's replay buffers without polling
verl_weights   verl's checkpoint engine "tq": weights that are verified before a rollout worker loads one
trl_weights    TRL's weight transfer: versions instead of tensors over NCCL
refit          one version of the weights from a trainer's rank to workers, all or none
nemo_rl        NeMo-RL's replay buffer and samplers on groups, without polling
roll           ROLL's transfer backend, row by row
vime           the bridge of vime's pull request 242, by name, method and flag
vllm           receivers inside vLLM's workers
sglang         receivers inside SGLang's workers
workers        what receivers inside the workers of inference servers share
"""
