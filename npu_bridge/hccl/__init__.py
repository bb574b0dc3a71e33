"""Collectives as TensorFlow ops."""
