"""Runs of somebody's script that are watched, varied, recorded or replayed from outside, for commands of `npu-run`.

A trial hangs `SessionRunHook`s on every session run that trains, whoever made the session: one writes the
history of losses, others change the initial weights by a rounding, save or feed what a step reads, or end the script
after some steps. `start.py` brings all that into a process whose script knows nothing of it. `search.py`, without
TensorFlow, finds the smallest set of operators that have to keep their dtype.
"""
