"""Whole training loops in one file each, small enough to read, on processes of one machine or on Ray.

single_controller          a driver tells every worker what to do and moves only metadata, the way of verl
disaggregated_streaming    nobody tells anybody: every worker takes rows as soon as their fields are there

Both share `workers` (child processes or Ray actors) and `bigram` (a policy of one matrix).
"""
