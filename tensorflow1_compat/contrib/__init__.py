"""Holds the modules of `tf.contrib`: user files import a module here as `tensorflow.contrib.<its name>`."""
