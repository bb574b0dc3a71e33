"""What the documented operators compute, written with TensorFlow's own.

One file for each kind of operator. Everything here is differentiable where the formula is, in TF 1 graphs, in a
`tf.function` and eagerly. The functions keep no state, but for the channels of `channels.py`.
"""
