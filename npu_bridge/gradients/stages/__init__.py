"""Holds the gradient transformations, a file for each kind, and parts of single stages. A new stage is a new file."""
