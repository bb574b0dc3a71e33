"""Implements `Communicator` with each engine: a single process, Horovod, and TensorFlow's own collective operators."""
