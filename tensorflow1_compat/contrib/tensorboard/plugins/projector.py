"""`tf.contrib.tensorboard.plugins.projector`: it moved to TensorBoard."""

from __future__ import annotations

import os

import tensorflow.compat.v1 as tf
from google.protobuf import text_format
from tensorboard.plugins.projector import EmbeddingInfo, ProjectorConfig


def visualize_embeddings(summary_writer, config):
    """Writes the projector's settings (a ProjectorConfig) into a writer's folder."""
    folder = summary_writer if isinstance(summary_writer, str) else summary_writer.get_logdir()
    folder = folder.decode() if isinstance(folder, bytes) else folder
    tf.gfile.MakeDirs(folder)
    with tf.gfile.Open(os.path.join(folder, "projector_config.pbtxt"), "w") as file:
        file.write(text_format.MessageToString(config))
