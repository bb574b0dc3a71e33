"""Saves and restores the state of stages and optimizers, including values that differ between ranks."""
