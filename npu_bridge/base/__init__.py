"""What everything else stands on: messages, files, the environment, the machine, and private names of TensorFlow."""
