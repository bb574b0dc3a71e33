"""Computes the documented operators with operators of TensorFlow.

There is one file for each kind of operator. All operators are differentiable where their formulas are, in TF 1 graphs,
in a `tf.function` and eagerly. The functions keep no state, except for the channels of `channels.py`. Sizes are read
from `shape.as_list()`: in scripts that switch the behaviour of TensorFlow 2 off, `shape[0]` is an object that is never
None.
"""
