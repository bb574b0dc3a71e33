"""Watches, varies, records and replays runs of an unchanged user's script, for commands of `npu-run`.

A trial adds `SessionRunHook`s to every session run that trains, also in sessions that the script makes itself. One hook
writes the history of losses. Other hooks round the initial weights, save or feed a step's inputs, or end the script
after some steps. `start.py` adds the hooks before the script starts. `search.py` finds the smallest set of operators
that must keep their dtype; it needs no TensorFlow.
"""
