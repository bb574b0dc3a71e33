"""Defines a saver for graphs that shard the weight update over the ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref

import tensorflow as tf

from npu_bridge.base.tf_internals.savers import bulk_saver_builder
from npu_bridge.gradients.checkpoints import remote_slots
from npu_bridge.session import hold_model_dir

__all__ = ["NPUBulkSaverBuilder", "NPUSaver"]


class NPUBulkSaverBuilder(bulk_saver_builder()):  # type: ignore[misc]  # a class of TensorFlow, looked up
    """TensorFlow's class, unchanged: builds the ops of a saver, with one save op for all variables."""


class NPUSaver(tf.compat.v1.train.Saver):
    """A `tf.compat.v1.train.Saver` that also saves the slots of other ranks.

    Use this saver in graphs with `NPUDistributedOptimizer(..., is_weight_update_sharding=True)` on several ranks, and
    make it after the optimizer has built its update. Every rank then calls `save`, and rank 0 writes. In any other
    graph `NPUSaver` is an ordinary saver. The arguments are those of `tf.compat.v1.train.Saver`. From its first save
    on, a saver locks the folder for as long as the saver exists: another job cannot save there.
    """

    @functools.wraps(tf.compat.v1.train.Saver.save, assigned=())
    def save(self, sess, save_path, *arguments, **keywords):
        """Saves variables like `tf.compat.v1.train.Saver.save`.

        Returns:
          The path prefix of the checkpoint. In a graph that shards weight updates, ranks above 0 write nothing and get
          None.
        Raises:
          ModelDirInUseError: (a RuntimeError) another job trains in the folder.
        Ranks: collective if weight updates are sharded, else local.
        """
        slots = remote_slots.find_remote_slots(sess.graph)
        if slots is not None and slots.ranks.rank > 0:
            slots.send_on_request(sess)
            return None
        self._hold_folder(os.path.dirname(save_path) or ".")
        with contextlib.nullcontext() if slots is None else slots.allow_remote_reads(sess):
            return super().save(sess, save_path, *arguments, **keywords)

    @staticmethod
    def from_proto(saver_def, import_scope=None):
        """Makes a saver from the result of `to_proto`."""
        return NPUSaver(saver_def=saver_def, name=import_scope)

    def _hold_folder(self, folder):
        held = self.__dict__.setdefault("_held", {})
        if folder not in held:
            hold = hold_model_dir(folder)
            if not hold.is_first:
                hold.release()  # the holder in this process keeps the folder for as long as it trains
                return
            held[folder] = hold
            weakref.finalize(self, hold.release)
        held[folder].check_still_held()
