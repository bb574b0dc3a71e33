"""Ends trainings after a whole step on request, so that they can resume with another number of ranks.

`stop_request.py` receives the request to end, and `stop_hook.py` then ends the training of a session.
`global_batches.py` gives every update the same rows with any number of ranks.
"""
