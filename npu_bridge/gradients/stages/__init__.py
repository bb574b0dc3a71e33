"""Holds the gradient transformations, one file for each kind. To add one, add a file with a subclass of `Stage`."""
