"""Wraps each undocumented name of Horovod that this package uses in a small function of its own.

No other module touches these names, so only this one must be checked for a new version of Horovod:
`tests/test_internals.py` calls every function and reports those that no longer work. Modules are imported when a
function is called. Seen in Horovod 0.28.1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    import types

BASICS_MODULE = "horovod.common.basics"  # defines the class whose `init` starts Horovod
MODULE = "horovod.tensorflow"
OPERATORS_MODULE = "horovod.tensorflow.mpi_ops"  # its `MPI_LIB` holds the functions that make operators
# The functions that combine values of ranks. A broadcast does not: it copies one rank's value.
_EXCHANGING = ("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "alltoall", "reducescatter")
_EXCHANGING += ("grouped_reducescatter",)


def wrap_init(basics: types.ModuleType, wrap: Callable[[Callable], Callable]) -> None:
    """Wraps `hvd.init` (`HorovodBasics.init`, Horovod 0.28).

    Args:
      basics: the module `BASICS_MODULE`.
      wrap: gets `init`, and returns the function that replaces `init`.
    """
    basics.HorovodBasics.init = wrap(basics.HorovodBasics.init)


def call_before_collectives(operators: types.ModuleType, callback: Callable[[Any], Any]) -> bool:
    """Makes Horovod call `callback` before each collective that combines values of ranks, in graphs and eagerly.

    Seen in Horovod 0.28: `mpi_ops.MPI_LIB`. Broadcasts combine no values.

    Args:
      operators: the module `OPERATORS_MODULE`.
      callback: a function that gets the tensor of the collective, or a list of tensors.
    Returns:
      False, without any change, while the module is being loaded.
    """
    if not hasattr(operators, "MPI_LIB"):
        return False

    def with_note(make: Callable) -> Callable:
        def function(tensors, *arguments, **keywords):
            callback(tensors)
            return make(tensors, *arguments, **keywords)

        return function

    for name in _EXCHANGING:
        setattr(operators.MPI_LIB, f"horovod_{name}", with_note(getattr(operators.MPI_LIB, f"horovod_{name}")))
    return True


def call_before_averaging(horovod_module: types.ModuleType, callback: Callable[[list], Any]) -> bool:
    """Makes new optimizers and tapes of Horovod call `callback` before they average gradients.

    Horovod caches its averaging functions, so a new optimizer can use operators that an earlier optimizer built. Seen
    in Horovod 0.28: `_make_allreduce_grads_fn`.

    Args:
      horovod_module: the module `horovod.tensorflow`.
      callback: a function that gets the list of gradients, some of them None.
    Returns:
      False, without any change, while the module is being loaded.
    """
    make = getattr(horovod_module, "_make_allreduce_grads_fn", None)
    if make is None:
        return False

    @functools.wraps(make)
    def make_with_note(*arguments, **keywords):
        average = make(*arguments, **keywords)

        def average_with_note(grads, *others, **named):
            callback(grads)
            return average(grads, *others, **named)

        return average_with_note

    vars(horovod_module)["_make_allreduce_grads_fn"] = make_with_note
    return True


def declared_process_sets(hvd: types.ModuleType) -> dict[int, list[int]]:
    """Returns the members of each process set by number; set 0 has all ranks (`mpi_ops._basics`, Horovod 0.28)."""
    found = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    return {number: list(members) for number, members in found.items()}


def process_set(hvd: types.ModuleType, number: int, members: Sequence[int]) -> Any:
    """Returns a ProcessSet with this number and these members (`ProcessSet.process_set_id`, Horovod 0.28)."""
    found = hvd.ProcessSet(members)
    found.process_set_id = number
    return found
