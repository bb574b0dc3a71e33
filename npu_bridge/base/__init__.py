"""Holds the lowest floor: messages, files, the environment, the machine, and private names of TensorFlow."""
