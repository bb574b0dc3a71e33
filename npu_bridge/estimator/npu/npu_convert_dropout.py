"""Makes Keras `Dropout` use the dropout of the device on the NPU stack; here it is TensorFlow's already.

Importing it changes nothing.
"""
