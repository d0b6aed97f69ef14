"""Parts of other frameworks that run ours.

vllm    receivers inside vLLM's workers
"""
