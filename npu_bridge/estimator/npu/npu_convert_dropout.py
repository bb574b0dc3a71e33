"""Scripts import this module so that Keras `Dropout` uses the dropout of the device; here it is TensorFlow's already.

Importing it changes nothing.
"""
