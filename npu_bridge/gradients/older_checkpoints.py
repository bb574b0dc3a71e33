"""Restores a checkpoint that was saved without a loss scale, or float32 values, into a training that has them."""

from __future__ import annotations

import logging

import tensorflow as tf

from npu_bridge.gradients import collections

_LOG = logging.getLogger(__name__)


def saver_for_older(checkpoint: str, **saver_arguments):
    """A saver that can restore a checkpoint which lacks loss scales or stand-ins of the graph being built.

    A run that starts to scale its loss finds no scale and no counters in the checkpoints it has. They start from their
    initial values then, and a line says so; so does what stands for variables of 16 bits. Everything else must be
    there, as usual.

    Args:
      checkpoint: path prefix of the checkpoint training will continue from.
    Returns:
      The saver, made with these arguments, or None when the checkpoint has everything and an ordinary saver will do.
    Graph: restore ops and an initialiser; call it when all variables exist.
    """
    saved = tf.train.load_checkpoint(checkpoint)
    kinds = (collections.LOSS_SCALE_STATE, collections.STAND_INS)
    state = [variable for kind in kinds for variable in tf.compat.v1.get_collection(kind)]
    missing = [variable for variable in state if not saved.has_tensor(_saved_name(variable))]
    return _ForgivingSaver(checkpoint, missing, **saver_arguments) if missing else None


class _ForgivingSaver(tf.compat.v1.train.Saver):
    def __init__(self, checkpoint, missing, **saver_arguments):
        super().__init__(**saver_arguments)
        self._older_checkpoint = checkpoint
        self._missing_names = [_saved_name(variable) for variable in missing]
        missing_ids = {id(variable) for variable in missing}
        restorable = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS)
        restorable += tf.compat.v1.global_variables()
        present = [saveable for saveable in restorable if id(saveable) not in missing_ids]
        self._present_only = tf.compat.v1.train.Saver(present)
        self._initialize_missing = tf.compat.v1.variables_initializer(missing)

    def restore(self, sess, save_path):
        if save_path != self._older_checkpoint:
            super().restore(sess, save_path)
            return
        self._present_only.restore(sess, save_path)
        sess.run(self._initialize_missing)
        _LOG.warning(
            "npu_bridge: %s was saved without %s; they start from their initial values.",
            save_path,
            ", ".join(self._missing_names),
        )


def _saved_name(variable):
    """Of a variable of the loss-scale state: its own name, which its operators need not have."""
    return variable.name.partition(":")[0]
