"""What `tf.contrib` had: a module here is `tensorflow.contrib.<its name>` to the user's source files."""
