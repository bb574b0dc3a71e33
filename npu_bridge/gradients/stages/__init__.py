"""Holds the gradient transformations, one file for each kind: a new one is a subclass of `Stage` in a file here."""
