"""Cases of `tf.contrib`, run in one process of a TensorFlow 1 script (see `run.py`)."""
