"""Pipelines of gradient transformations around Keras optimizers of all generations."""
