"""What Python, numpy and SciPy had when scripts of TensorFlow 1 were written, for the user's files alone."""
