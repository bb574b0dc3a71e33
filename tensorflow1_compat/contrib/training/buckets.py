"""Batches of examples of similar length, through queues: `tf.contrib.training.bucket_by_sequence_length`."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def bucket(
    tensors, which_bucket, batch_size, num_buckets, num_threads=1, capacity=32, bucket_capacities=None, shapes=None,
    dynamic_pad=False, allow_smaller_final_batch=False, keep_input=True, shared_name=None, name=None,
):  # fmt: skip
    """Batches of examples that fell into the same bucket.

    Args:
      tensors: list or dict of tensors: one example.
      which_bucket: int32 scalar in [0, num_buckets).
      batch_size: examples in a batch, or a list with one number for each bucket.
      capacity: batches that wait; `bucket_capacities`: examples that wait in each bucket.
      shapes: static shapes, where the tensors do not tell them.
      dynamic_pad: pads to the longest of a batch; else all shapes have to be known.
      allow_smaller_final_batch: gives what is left in the buckets at the end.
      keep_input: bool scalar; whether the example counts.

    Returns:
      (which bucket: int32 scalar, tensors as they came with a batch axis in front).

    Graph: queue runners in `tf.GraphKeys.QUEUE_RUNNERS`.
    """
    flat = tf.nest.flatten(tensors)
    sizes = list(batch_size) if isinstance(batch_size, (list, tuple)) else [batch_size] * num_buckets
    with tf.name_scope(name, "bucket", flat):
        flat = [tf.convert_to_tensor(each) for each in flat]
        dtypes = [each.dtype for each in flat]
        shapes = [tf.TensorShape(shape) for shape in shapes] if shapes else [each.shape for each in flat]
        make_queue = tf.PaddingFIFOQueue if dynamic_pad else tf.FIFOQueue
        buckets = [
            make_queue((bucket_capacities or [capacity] * num_buckets)[each], dtypes, shapes, name=f"bucket_{each}")
            for each in range(num_buckets)
        ]
        of_batches = [tf.TensorShape([None]).concatenate(shape) for shape in shapes]
        top = tf.PaddingFIFOQueue(capacity, [tf.int32, *dtypes], [tf.TensorShape([]), *of_batches], name="top_queue")
        which = tf.convert_to_tensor(which_bucket, tf.int32)

        def put(queue):
            return lambda: tf.group(queue.enqueue(flat))

        def put_where_it_belongs():
            choices = [(tf.equal(which, each), put(queue)) for each, queue in enumerate(buckets)]
            return tf.case(choices, exclusive=True)

        enqueue = tf.cond(tf.convert_to_tensor(keep_input), put_where_it_belongs, tf.no_op)
        enqueue = enqueue if isinstance(enqueue, tf.Operation) else enqueue.op
        close = tf.group(*(queue.close() for queue in buckets))
        cancel = tf.group(*(queue.close(cancel_pending_enqueues=True) for queue in buckets))
        tf.train.add_queue_runner(
            tf.train.QueueRunner(buckets[0], [enqueue] * num_threads, close, cancel, (tf.errors.OutOfRangeError,))
        )
        forward = []
        for each, (queue, size) in enumerate(zip(buckets, sizes)):
            batch = (queue.dequeue_up_to if allow_smaller_final_batch else queue.dequeue_many)(size)
            batch = list(batch) if isinstance(batch, (list, tuple)) else [batch]
            forward.append(top.enqueue([tf.constant(each, tf.int32), *batch]))
        ends = (tf.errors.OutOfRangeError, tf.errors.CancelledError)
        tf.train.add_queue_runner(
            tf.train.QueueRunner(top, forward, top.close(), top.close(cancel_pending_enqueues=True), ends)
        )
        taken = top.dequeue()
        for tensor, shape, size in zip(taken[1:], of_batches, [sizes[0]] * len(flat)):
            is_full = not allow_smaller_final_batch and len(set(sizes)) == 1
            tensor.set_shape(tf.TensorShape([size if is_full else None]).concatenate(shape[1:]))
        return taken[0], tf.nest.pack_sequence_as(tensors, list(taken[1:]))


def bucket_by_sequence_length(
    input_length, tensors, batch_size, bucket_boundaries, num_threads=1, capacity=32, bucket_capacities=None,
    shapes=None, dynamic_pad=False, allow_smaller_final_batch=False, keep_input=True, shared_name=None, name=None,
):  # fmt: skip
    """Batches of examples of similar length.

    Args:
      input_length: int32 scalar, the length of this example.
      bucket_boundaries: growing list; bucket 0 takes lengths below the first, the last one those from the last on.
      Others: see `bucket`.

    Returns:
      (lengths: int32 [batch], tensors with a batch axis in front).
    """
    if any(low >= high for low, high in zip(bucket_boundaries, bucket_boundaries[1:])) or not bucket_boundaries:
        raise ValueError(f"bucket_by_sequence_length: bucket_boundaries have to grow; got {bucket_boundaries}.")
    with tf.name_scope(name, "bucket_by_sequence_length"):
        length = tf.convert_to_tensor(input_length, tf.int32)
        which = tf.reduce_sum(tf.cast(length >= tf.constant(bucket_boundaries, tf.int32), tf.int32))
        flat_shapes = None if shapes is None else [[], *shapes]
        _, (lengths, batch) = bucket(
            (length, tensors), which, batch_size, len(bucket_boundaries) + 1, num_threads, capacity, bucket_capacities,
            flat_shapes, dynamic_pad, allow_smaller_final_batch, keep_input, shared_name,
        )  # fmt: skip
        return lengths, batch
