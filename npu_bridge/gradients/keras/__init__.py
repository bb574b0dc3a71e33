"""Pipelines of gradient transformations around Keras optimizers of both generations."""
