"""Accepted for compatibility; importing this module changes nothing.

On the NPU stack it makes Keras `Dropout` use the device's dropout; here Keras keeps TensorFlow's dropout.
"""
