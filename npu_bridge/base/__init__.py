"""Holds the lowest layer: messages, files, the environment, the machine, and private names of TensorFlow."""
