"""Defines a saver for graphs in which ranks share the work of updating weights."""

from __future__ import annotations

import contextlib
import os
import weakref

import tensorflow as tf

from npu_bridge.base.tf_internals.savers import bulk_saver_builder
from npu_bridge.gradients import remote_slots
from npu_bridge.session import hold_model_dir

__all__ = ["NPUBulkSaverBuilder", "NPUSaver"]


class NPUBulkSaverBuilder(bulk_saver_builder()):  # type: ignore[misc]  # a class of TensorFlow, looked up
    """Builds the ops of a saver as TensorFlow does: all variables in one save op."""


class NPUSaver(tf.compat.v1.train.Saver):
    """A `tf.compat.v1.train.Saver` that also saves the slots of other ranks.

    It is for graphs with `NPUDistributedOptimizer(..., is_weight_update_sharding=True)` on several ranks. There every
    rank calls `save`, and rank 0 writes. Make it after the optimizer has built its update. In any other graph it is an
    ordinary saver. Arguments are those of `tf.compat.v1.train.Saver`. From its first save on it holds the folder, while
    it lives: another job cannot save there.
    """

    def save(
        self,
        sess,
        save_path,
        global_step=None,
        latest_filename=None,
        meta_graph_suffix="meta",
        write_meta_graph=True,
        write_state=True,
        strip_default_attrs=False,
        save_debug_info=False,
    ):
        """Saves variables as `tf.compat.v1.train.Saver.save`.

        Returns:
          The path prefix of the checkpoint. In a graph that shards weight updates, None on ranks above 0: they do not
          write.
        Raises:
          ModelDirInUseError: (a RuntimeError) another job trains in the folder.
        Ranks: collective if weight updates are sharded, else local.
        """
        slots = remote_slots.of_graph(sess.graph)
        if slots is not None and slots.ranks.rank > 0:
            slots.listen(sess)
            return None
        self._hold(os.path.dirname(save_path) or ".")
        with contextlib.nullcontext() if slots is None else slots.listened_to(sess):
            return super().save(
                sess,
                save_path,
                global_step,
                latest_filename,
                meta_graph_suffix,
                write_meta_graph,
                write_state,
                strip_default_attrs,
                save_debug_info,
            )

    @staticmethod
    def from_proto(saver_def, import_scope=None):
        """Makes a saver from the result of `to_proto`."""
        return NPUSaver(saver_def=saver_def, name=import_scope)

    def _hold(self, folder):
        held = self.__dict__.setdefault("_held", {})
        if folder not in held:
            hold = hold_model_dir(folder)
            if not hold.is_first:
                hold.release()  # the holder in this process keeps the folder for as long as it trains
                return
            held[folder] = hold
            weakref.finalize(self, hold.release)
        held[folder].check()
