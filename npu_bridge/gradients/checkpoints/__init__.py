"""Saves and restores state of stages and optimizers, also values that differ between ranks."""
