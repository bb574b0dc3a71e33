"""Defines thread pools of datasets: `tensorflow.python.data.experimental.ops.threadpool`."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


class PrivateThreadPool:
    """A pool of threads that only datasets with this pool use.

    Args:
      num_threads: number of threads.
      max_intra_op_parallelism: maximum number of threads of one operator.
      display_name: not used.
    """

    def __init__(self, num_threads, max_intra_op_parallelism=1, display_name=None):
        self.num_threads, self.max_intra_op_parallelism = num_threads, max_intra_op_parallelism


def override_threadpool(dataset, thread_pool):
    """Returns a dataset like `dataset` whose transformations run in the threads of `thread_pool`."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = thread_pool.num_threads
    if thread_pool.max_intra_op_parallelism:
        options.threading.max_intra_op_parallelism = thread_pool.max_intra_op_parallelism
    return dataset.with_options(options)
