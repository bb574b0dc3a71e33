"""Computes the documented operators with TensorFlow's own.

One file for each kind of operator. Everything here is differentiable where the formula is, in TF 1 graphs, in a
`tf.function` and eagerly. The functions keep no state, except for the channels of `channels.py`. Sizes are read from
`shape.as_list()`: in scripts that switch the behaviour of TensorFlow 2 off, `shape[0]` is an object that is never None.
"""
