"""Parts of other frameworks that run ours.

vime    the bridge of vime's pull request 242, by name, method and flag
vllm    receivers inside vLLM's workers
"""
