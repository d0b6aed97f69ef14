"""Tests with the real SGLang on a CPU, in an environment of its own: `make test-sglang`.

environment   its packages, and which of SGLang's requirements are left out
launch        starts a server: what stands in for kernels that only GPUs have

What it shares with the tests of vLLM is imported from `vllm_tests`.
"""
