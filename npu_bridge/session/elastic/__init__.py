"""Trainings that outlive their processes: they end after a whole step when asked to, and go on with other ranks.

`stop_request.py` is where a process learns that it shall end, `stop_hook.py` ends the training of a session for it, and
`global_batches.py` gives every update the same rows, whatever the number of ranks.
"""
