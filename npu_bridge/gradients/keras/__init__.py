"""Wraps pipelines of gradient transformations around Keras optimizers of all generations."""
