"""Lets trainings outlive their processes: they end after a whole step on request, and resume with other ranks.

`stop_request.py` receives the request to end, `stop_hook.py` ends the training of a session for it, and
`global_batches.py` gives every update the same rows with any number of ranks.
"""
