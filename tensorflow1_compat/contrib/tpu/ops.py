"""`tf.contrib.tpu.python.ops.tpu_ops`: operations for computations on TPUs, implemented for one shard."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def cross_replica_sum(x, group_assignment=None, name=None):
    """Sums a tensor over all shards; with one shard, returns the tensor itself."""
    return tf.identity(x, name=name or "CrossReplicaSum")


def all_to_all(x, concat_dimension, split_dimension, split_count, group_assignment=None, name=None):
    """Exchanges pieces between shards; with one shard, returns the tensor itself."""
    return tf.identity(x, name=name or "AllToAll")


def collective_permute(x, source_target_pairs, name=None):
    """Returns the value of another shard; with one shard, returns the tensor itself."""
    return tf.identity(x, name=name or "CollectivePermute")


def initialize_system(embedding_config=None, job=None, compilation_failure_closes_chips=True, **_):
    """Returns an empty string tensor in place of an operation that initialises TPUs."""
    return tf.constant(b"", name="ConfigureDistributedTPU")


def shutdown_system(job=None):
    """Returns an operation without effect in place of an operation that shuts TPUs down."""
    return tf.no_op(name="ShutdownDistributedTPU")


def core(num):
    """Returns "", which allows any device, in place of the name of a TPU core."""
    return ""


def outside_compilation(computation, *args, **kwargs):
    """Calls `computation(*args, **kwargs)`; nothing is compiled."""
    return computation(*args, **kwargs)


def _as_list(outputs):
    if outputs is None:
        return []
    return [outputs] if tf.is_tensor(outputs) or isinstance(outputs, tf.Operation) else list(outputs)


def rewrite(computation, inputs=None, infeed_queue=None, device_assignment=None, name=None, **_):
    """Calls `computation(*inputs)`; returns a list of its tensors, which wait for its operations.

    If it returns only operations, returns one operation that groups them.
    """
    outputs = _as_list(computation(*(tf.convert_to_tensor(each) for each in inputs or [])))
    operations = [each for each in outputs if isinstance(each, tf.Operation)]
    tensors = [tf.convert_to_tensor(each) for each in outputs if not isinstance(each, tf.Operation)]
    if not tensors:
        return tf.group(*operations)
    with tf.control_dependencies(operations):
        return [tf.identity(each) for each in tensors]


def replicate(computation, inputs=None, infeed_queue=None, device_assignment=None, name=None, **_):
    """Calls the computation for each list of inputs; returns the lists of outputs in order."""
    return [rewrite(computation, each) for each in (inputs or [[]])]


def shard(
    computation, inputs=None, num_shards=1, input_shard_axes=None, outputs_from_all_shards=True, output_shard_axes=None,
    infeed_queue=None, device_assignment=None, name=None, **_,
):  # fmt: skip
    """Applies a computation to parts of the inputs, and joins the outputs.

    Args:
      computation: function of one part of each input.
      inputs: tensors, each split into `num_shards` along its axis of `input_shard_axes` (default 0).
      outputs_from_all_shards: whether to concatenate outputs along `output_shard_axes`; False returns only the outputs
        of the first shard.
    """
    inputs = [tf.convert_to_tensor(each) for each in inputs or []]
    axes = input_shard_axes or [0] * len(inputs)
    parts = (
        zip(*(tf.split(each, num_shards, axis) for each, axis in zip(inputs, axes))) if inputs else [()] * num_shards
    )
    results = [rewrite(computation, list(part)) for part in parts]
    if not isinstance(results[0], list):
        return tf.group(*results)
    count = len(results[0])
    from_all = outputs_from_all_shards if isinstance(outputs_from_all_shards, (list, tuple)) else None
    from_all = from_all or [bool(outputs_from_all_shards)] * count
    out_axes = output_shard_axes or [0] * count
    return [
        tf.concat([result[place] for result in results], out_axes[place]) if from_all[place] and num_shards > 1
        else results[0][place]
        for place in range(count)
    ]  # fmt: skip


def batch_parallel(computation, inputs=None, num_shards=1, infeed_queue=None, device_assignment=None, name=None, **_):
    """Calls `shard` with every input and output split along its first axis, the batch."""
    return shard(computation, inputs, num_shards)
