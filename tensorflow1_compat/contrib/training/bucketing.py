"""Batches similar examples through queues: `bucket`, `bucket_by_sequence_length`."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def bucket(
    tensors, which_bucket, batch_size, num_buckets, num_threads=1, capacity=32, bucket_capacities=None, shapes=None,
    dynamic_pad=False, allow_smaller_final_batch=False, keep_input=True, shared_name=None, name=None,
):  # fmt: skip
    """Returns batches of examples; all examples of a batch are from one bucket.

    Args:
      tensors: a list or dict of an example's tensors, also SparseTensors.
      which_bucket: the example's bucket, an int32 scalar from 0 to `num_buckets` - 1.
      batch_size: batch size, or a list with the batch size of each bucket.
      num_threads: number of threads that put examples into buckets.
      capacity: capacity of the queue of batches; also of each bucket's queue, unless `bucket_capacities` is given.
      shapes: shapes of the tensors; default: their static shapes.
      dynamic_pad: whether to pad examples to the largest in the batch; otherwise all shapes must be known.
      allow_smaller_final_batch: whether to return remaining examples in a last, smaller batch.
      keep_input: bool scalar; False discards the example.

    Returns:
      (bucket of the batch, batched tensors in the structure of `tensors`).

    Graph: queue runners in `tf.GraphKeys.QUEUE_RUNNERS`.
    """
    flat = list(tensors.values()) if isinstance(tensors, dict) else list(tensors)
    sizes = list(batch_size) if isinstance(batch_size, (list, tuple)) else [batch_size] * num_buckets
    if not flat or num_buckets < 2:
        raise ValueError(f"bucket: expected tensors and two buckets or more; got {len(flat)} and {num_buckets}.")
    capacities = bucket_capacities or [capacity] * num_buckets
    if len(sizes) != num_buckets or len(capacities) != num_buckets:
        raise ValueError(f"bucket: batch_size and bucket_capacities must have exactly num_buckets={num_buckets} "
                         f"entries; got {len(sizes)} and {len(capacities)}.")  # fmt: skip
    with tf.name_scope(name, "bucket", tf.nest.flatten(flat)):
        sparse = [tf.SparseTensor.from_value(each) if isinstance(each, tf.SparseTensorValue) else
                  each if isinstance(each, tf.SparseTensor) else None for each in flat]  # fmt: skip
        parts = [tf.convert_to_tensor(each) if place is None else tf.serialize_sparse(place)
                 for each, place in zip(flat, sparse)]  # fmt: skip
        shapes = [tf.TensorShape(each) for each in shapes or [part.shape for part in parts]]
        dtypes = [part.dtype for part in parts]
        kind = tf.PaddingFIFOQueue if dynamic_pad else tf.FIFOQueue
        queues = [kind(size, dtypes, shapes, shared_name=shared_name and f"{shared_name}_{place}")
                  for place, size in enumerate(capacities)]  # fmt: skip
        which_bucket = tf.cast(which_bucket, tf.int32)
        put = [tf.cond(tf.equal(which_bucket, place) & keep_input, lambda queue=queue: queue.enqueue(parts), tf.no_op)
               for place, queue in enumerate(queues)]  # fmt: skip
        tf.train.add_queue_runner(tf.train.QueueRunner(
            queues[0], [tf.group(*put)] * num_threads, tf.group(*(queue.close() for queue in queues)),
            tf.group(*(queue.close(cancel_pending_enqueues=True) for queue in queues)),
            (tf.errors.OutOfRangeError, tf.errors.CancelledError),
        ))  # fmt: skip
        batches = tf.FIFOQueue(capacity, [tf.int32, *dtypes], shared_name=shared_name and f"{shared_name}_batches")
        take = "dequeue_up_to" if allow_smaller_final_batch else "dequeue_many"
        moves = [batches.enqueue([tf.constant(place), *_as_list(getattr(queue, take)(size))])
                 for place, (queue, size) in enumerate(zip(queues, sizes))]  # fmt: skip
        tf.train.add_queue_runner(tf.train.QueueRunner(
            batches, moves, queue_closed_exception_types=(tf.errors.OutOfRangeError, tf.errors.CancelledError)
        ))  # fmt: skip
        found, *outputs = batches.dequeue()
        found.set_shape([])
        known = None if allow_smaller_final_batch or len(set(sizes)) > 1 else sizes[0]
        for output, shape in zip(outputs, shapes):
            output.set_shape(tf.TensorShape([known]).concatenate(shape))
        for at, place in enumerate(sparse):
            if place is not None:
                rank = None if place.shape.rank is None else place.shape.rank + 1
                outputs[at] = tf.deserialize_many_sparse(outputs[at], place.dtype, rank)
        return found, dict(zip(tensors, outputs)) if isinstance(tensors, dict) else outputs


def _as_list(tensor_or_list):
    return tensor_or_list if isinstance(tensor_or_list, (list, tuple)) else [tensor_or_list]


def bucket_by_sequence_length(
    input_length, tensors, batch_size, bucket_boundaries, num_threads=1, capacity=32, bucket_capacities=None,
    shapes=None, dynamic_pad=False, allow_smaller_final_batch=False, keep_input=True, shared_name=None, name=None,
):  # fmt: skip
    """Returns batches of sequences of similar lengths.

    Args:
      input_length: length of the example's sequence, an int32 scalar.
      bucket_boundaries: the shortest length in each bucket except the first, ascending.
      others: see `bucket`.

    Returns:
      (lengths: int32 [batch], batched tensors).
    """
    bounds = list(bucket_boundaries)
    if not bounds or any(not isinstance(each, int) for each in bounds):
        raise TypeError(f"bucket_by_sequence_length: bucket_boundaries must be a list of int; got {bounds}.")
    if any(low >= high for low, high in zip(bounds, bounds[1:])):
        raise ValueError(f"bucket_by_sequence_length: bucket_boundaries must be ascending; got {bounds}.")
    if shapes is not None:
        shapes = [tf.TensorShape([]), *shapes]
    is_dict = isinstance(tensors, dict)
    with tf.name_scope(name, "bucket_by_sequence_length", [input_length]):
        length = tf.convert_to_tensor(input_length, tf.int32)
        which = tf.reduce_sum(tf.cast(tf.constant(bounds) <= length, tf.int32))
        _, (lengths, *outputs) = bucket(
            [length, *(tensors.values() if is_dict else tensors)], which, batch_size, len(bounds) + 1, num_threads,
            capacity, bucket_capacities, shapes, dynamic_pad, allow_smaller_final_batch, keep_input, shared_name,
        )  # fmt: skip
        return lengths, dict(zip(tensors, outputs)) if is_dict else outputs
