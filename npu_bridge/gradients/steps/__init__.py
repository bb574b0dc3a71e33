"""Keeps steps between the calls of a script, runs parts of a step in branches, and reports steps."""
