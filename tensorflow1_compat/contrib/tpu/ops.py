"""`tf.contrib.tpu.python.ops.tpu_ops`: operations around computations on TPUs, for one shard."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def cross_replica_sum(x, group_assignment=None, name=None):
    """Returns the sum over all shards: with one shard, the tensor."""
    return tf.identity(x, name=name or "CrossReplicaSum")


def all_to_all(x, concat_dimension, split_dimension, split_count, group_assignment=None, name=None):
    """Returns the pieces of all shards: with one shard, the tensor."""
    return tf.identity(x, name=name or "AllToAll")


def collective_permute(x, source_target_pairs, name=None):
    """Returns the value of another shard: with one shard, the tensor."""
    return tf.identity(x, name=name or "CollectivePermute")


def initialize_system(embedding_config=None, job=None, compilation_failure_closes_chips=True, **_):
    """Returns an op that initialises TPUs; here it returns an empty string."""
    return tf.constant(b"", name="ConfigureDistributedTPU")


def shutdown_system(job=None):
    """Returns an op that shuts TPUs down; here it does nothing."""
    return tf.no_op(name="ShutdownDistributedTPU")


def core(num):
    """Returns the device of a TPU's core; here any device."""
    return ""


def outside_compilation(computation, *args, **kwargs):
    """Calls `computation(*args, **kwargs)`: nothing is compiled here."""
    return computation(*args, **kwargs)


def _listed(outputs):
    if outputs is None:
        return []
    return [outputs] if tf.is_tensor(outputs) or isinstance(outputs, tf.Operation) else list(outputs)


def rewrite(computation, inputs=None, infeed_queue=None, device_assignment=None, name=None, **_):
    """Returns the list of outputs of `computation(*inputs)`; its operations run before any of its tensors."""
    outputs = _listed(computation(*(tf.convert_to_tensor(each) for each in inputs or [])))
    operations = [each for each in outputs if isinstance(each, tf.Operation)]
    tensors = [tf.convert_to_tensor(each) for each in outputs if not isinstance(each, tf.Operation)]
    if not tensors:
        return tf.group(*operations)
    with tf.control_dependencies(operations):
        return [tf.identity(each) for each in tensors]


def replicate(computation, inputs=None, infeed_queue=None, device_assignment=None, name=None, **_):
    """Returns the outputs of the computation for each list of inputs, in order."""
    return [rewrite(computation, each) for each in (inputs or [[]])]


def shard(
    computation, inputs=None, num_shards=1, input_shard_axes=None, outputs_from_all_shards=True, output_shard_axes=None,
    infeed_queue=None, device_assignment=None, name=None, **_,
):  # fmt: skip
    """Applies a computation to parts of the inputs, and joins the outputs.

    Args:
      computation: function of one part of each input.
      inputs: tensors, each split into `num_shards` along its axis of `input_shard_axes` (default 0).
      outputs_from_all_shards: concatenates outputs along `output_shard_axes`; otherwise returns the first shard's.
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
    """Calls `shard` along the batch of every input and output."""
    return shard(computation, inputs, num_shards)
