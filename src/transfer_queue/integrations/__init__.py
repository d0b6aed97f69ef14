"""Parts of other frameworks that run ours.

loggers        counts and sizes of the service in the log of a training run: wandb, TensorBoard
verl_replay    verl's replay buffers without polling
nemo_rl        NeMo-RL's replay buffer and samplers on groups, without polling
roll           ROLL's transfer backend, row by row
vime           the bridge of vime's pull request 242, by name, method and flag
vllm           receivers inside vLLM's workers
"""
