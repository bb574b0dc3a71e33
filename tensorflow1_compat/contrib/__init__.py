"""Holds the modules of `tf.contrib`: in user files, `tensorflow.contrib.x` is the module `x` of this package."""
