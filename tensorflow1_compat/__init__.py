"""Lets the user's source files import and call TensorFlow 1.15, on the installed TensorFlow 2."""
