"""Watches, varies, records and replays runs of a user's script from outside, for commands of `npu-run`.

A trial adds `SessionRunHook`s to every session run that trains, also in the script's own sessions: one writes the
history of losses; others round the initial weights, save or feed a step's inputs, or end the script after some steps.
`start.py` sets this up in a process whose script knows nothing of it. `search.py`, without TensorFlow, finds the
smallest set of operators that must keep their dtype.
"""
