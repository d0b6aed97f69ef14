"""Tests with a real vLLM (the community's CPU build), in an environment of its own: `make test-vllm`."""
