"""Provides `npu_bridge.experimental`: this process's rank, the number of ranks, and operators that need a device."""

from __future__ import annotations

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.operators.unavailable import unavailable_function

__all__ = [
    "decode_image",
    "file_constant",
    "get_actual_rank_size",
    "get_user_rank_id",
    "get_user_rank_size",
    "getshape",
]


def get_actual_rank_size() -> int:
    """Returns the number of ranks in the job; 1 if this process trains alone."""
    return collective.current().size


def get_user_rank_size() -> int:
    """Returns the number of ranks that the environment declares; 1 if no variable declares it.

    Raises:
      ValueError: RANK_SIZE and CM_WORKER_SIZE are both set, or the number is below 1.
    """
    return environment.declared_world_size()


def get_user_rank_id() -> int:
    """Returns the rank that RANK_ID declares; 0 when it is not set.

    Raises:
      ValueError: RANK_ID is not a whole number.
    """
    return environment.declared_rank() or 0


file_constant = unavailable_function(
    "experimental.file_constant", "a file that the device reads", "Use tf.io.read_file and tf.io.decode_raw."
)
getshape = unavailable_function("experimental.getshape", "an operator of the device", "Use tf.shape.")
decode_image = unavailable_function("experimental.decode_image", "a decoder of the device", "Use tf.io.decode_image.")
