"""`tf.contrib.tensorboard.plugins.projector`, which is now part of TensorBoard."""

from __future__ import annotations

import os

import tensorflow.compat.v1 as tf
from google.protobuf import text_format
from tensorboard.plugins.projector import EmbeddingInfo, ProjectorConfig


def visualize_embeddings(summary_writer, config):
    """Writes the settings of the embedding projector (a ProjectorConfig) to the folder of a summary writer."""
    folder = summary_writer if isinstance(summary_writer, str) else summary_writer.get_logdir()
    folder = folder.decode() if isinstance(folder, bytes) else folder
    tf.gfile.MakeDirs(folder)
    with tf.gfile.Open(os.path.join(folder, "projector_config.pbtxt"), "w") as file:
        file.write(text_format.MessageToString(config))
