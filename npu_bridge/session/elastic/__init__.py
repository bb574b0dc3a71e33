"""Ends trainings after a whole step on request, so that they can resume with another number of ranks."""
