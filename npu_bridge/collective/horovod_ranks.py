"""The communicator of a job with several ranks: the one module that imports Horovod."""

from __future__ import annotations

import platform

import tensorflow as tf

from npu_bridge.collective.communicator import Communicator

_INSTALL_COMMAND = (
    "HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 "
    "HOROVOD_WITHOUT_MXNET=1 pip install --no-build-isolation 'npu-bridge[horovod]'"
)


class HorovodUnavailableError(RuntimeError):
    """Several ranks were started, but Horovod is missing or was built for another TensorFlow."""


class HorovodCommunicator(Communicator):
    """The ranks of a Horovod job. Horovod is started by the first use and closes itself at exit.

    Raises:
      HorovodUnavailableError: Horovod cannot be imported; the message holds the command that installs it.
    """

    def __init__(self):
        self._hvd = _import_horovod()
        if not self._hvd.is_initialized():
            self._hvd.init()
        self.rank = self._hvd.rank()
        self.size = self._hvd.size()
        self.local_rank = self._hvd.local_rank()
        self.local_size = self._hvd.local_size()

    def all_reduce(self, tensors, name, average=True, prescale=1.0):
        results = [None] * len(tensors)
        for dtype, positions in _positions_by_dtype(tensors).items():
            wire_dtype = _WIDENED.get(dtype, dtype)
            reduced = self._hvd.grouped_allreduce(
                [tf.cast(tensors[position], wire_dtype) for position in positions],
                op=self._hvd.Average if average else self._hvd.Sum,
                prescale_factor=prescale,
                name=f"{name}_{dtype.name}",
            )
            for position, tensor in zip(positions, reduced):
                results[position] = tf.cast(tensor, dtype)
        return results

    def all_gather(self, tensor, name):
        dtype = tf.as_dtype(tensor.dtype)
        wire_dtype = _WIDENED.get(dtype, dtype)
        return tf.cast(self._hvd.allgather(tf.cast(tensor, wire_dtype), name=name), dtype)

    def all_true(self, flag, name):
        # A sum of "no" votes: Sum is the one reduction that every Horovod controller has for int32.
        votes = tf.cast(tf.logical_not(flag), tf.int32)
        return tf.equal(self._hvd.allreduce(votes, op=self._hvd.Sum, name=name), 0)

    def broadcast_variables(self, variables, root_rank):
        assigned = [
            self._broadcast_variable(variable, root_rank, f"broadcast_{position}")
            for position, variable in enumerate(variables)
        ]
        return None if tf.executing_eagerly() else tf.group(*assigned)

    def number_of_root(self, number, root_rank):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            sent = self._hvd.broadcast(tf.constant(number, tf.int64), root_rank, name="number_of_root")
            return int(session.run(sent))

    def _broadcast_variable(self, variable, root_rank, prefix):
        value = tf.convert_to_tensor(variable)
        wire_dtype = _WIDENED.get(value.dtype, value.dtype)
        name = f"{prefix}_{variable.name}".replace(":", "_").replace("/", "_")
        root_value = self._hvd.broadcast(tf.cast(value, wire_dtype), root_rank, name=name)
        return variable.assign(tf.cast(root_value, value.dtype))


# Horovod 0.28 has no wire format for these; float32 holds every bfloat16 and int32 every 16-bit integer.
_WIDENED = {tf.bfloat16: tf.float32, tf.int16: tf.int32, tf.uint16: tf.int32}


def _positions_by_dtype(tensors):
    """Groups list positions by dtype: one transfer holds one dtype."""
    groups = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(tf.as_dtype(tensor.dtype).base_dtype, []).append(position)
    return groups


def _import_horovod():
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # a broken extension raises whatever its loader raises
        raise HorovodUnavailableError(
            f"npu_bridge.collective: several ranks were started, but Horovod cannot be used. Expected horovod 0.28 "
            f"built for TensorFlow {tf.__version__} and Python {platform.python_version()}; got "
            f"{type(error).__name__}: {error}. Install it with: {_INSTALL_COMMAND}"
        ) from error
    return hvd
