"""`tf.contrib.summary`: operators that write summaries when a session runs them."""

from __future__ import annotations

import tensorflow.compat.v1 as tf
from tensorflow.python.ops.summary_ops_v2 import (
    SummaryWriter,
    always_record_summaries,
    audio,
    create_file_writer,
    create_summary_file_writer,
    eval_dir,
    generic,
    histogram,
    image,
    import_event,
    initialize,
    never_record_summaries,
    record_summaries_every_n_global_steps,
    scalar,
    should_record_summaries,
    summary_writer_initializer_op,
)
from tensorflow.python.ops.summary_ops_v2 import graph_v1 as graph
from tensorflow.python.ops.summary_ops_v2 import legacy_raw_flush as flush

from npu_bridge.base.tf_internals.sessions import summary_operators

record_summaries_if = tf.compat.v2.summary.record_if


def all_summary_ops():
    """Returns the operations of the default graph that write summaries; None in eager execution."""
    return None if tf.executing_eagerly() else summary_operators()
