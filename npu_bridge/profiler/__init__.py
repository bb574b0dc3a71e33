"""Traces of part of a script."""
