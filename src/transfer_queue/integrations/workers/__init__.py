"""Receivers in the workers of an inference server, whose calls may not raise: what those of vLLM and SGLang share.

worker      the four calls: faults are reported, all but the commit goes on beside
 ├─ lane    calls in a thread beside the worker's
 └─ ranks   the workers of one server commit together
reloading   the target: versions go through the model's own loader, all or none
headers     what that loader takes, by the checkpoint that was served
"""
