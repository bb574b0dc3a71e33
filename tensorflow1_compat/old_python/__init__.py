"""Brings back functions of old versions of Python, numpy and SciPy, only for the user's files."""
