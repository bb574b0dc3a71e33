"""Wraps every name of Horovod outside its documented interface that this package uses, one small function for each.

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


def change_init(basics: types.ModuleType, wrap: Callable[[Callable], Callable]) -> None:
    """Wraps `hvd.init` (`HorovodBasics.init`, Horovod 0.28).

    Args:
      basics: the module `BASICS_MODULE`.
      wrap: returns the function that replaces its argument.
    """
    basics.HorovodBasics.init = wrap(basics.HorovodBasics.init)


def call_at_exchanges(operators: types.ModuleType, note: Callable[[Any], Any]) -> bool:
    """Calls a function at every collective that combines values of ranks, in a graph being built or eagerly.

    Seen in Horovod 0.28: `mpi_ops.MPI_LIB`. Broadcasts do not count.

    Args:
      operators: the module `OPERATORS_MODULE`.
      note: the function; it gets the tensor of the collective, or a list of them.
    Returns:
      False, without any change, while the module is being loaded.
    """
    if not hasattr(operators, "MPI_LIB"):
        return False

    def noted(make: Callable) -> Callable:
        def function(tensors, *arguments, **keywords):
            note(tensors)
            return make(tensors, *arguments, **keywords)

        return function

    for name in _EXCHANGING:
        setattr(operators.MPI_LIB, f"horovod_{name}", noted(getattr(operators.MPI_LIB, f"horovod_{name}")))
    return True


def call_at_averages(horovod: types.ModuleType, note: Callable[[list], Any]) -> bool:
    """Calls a function whenever an optimizer or a tape of Horovod, made from now on, averages gradients.

    Horovod averages them in functions that it keeps for all optimizers, so the operators can exist already. Seen in
    Horovod 0.28: `_make_allreduce_grads_fn`.

    Args:
      horovod: the module `horovod.tensorflow`.
      note: the function; it gets the list of gradients, some of them None.
    Returns:
      False, without any change, while the module is being loaded.
    """
    make = getattr(horovod, "_make_allreduce_grads_fn", None)
    if make is None:
        return False

    @functools.wraps(make)
    def make_noted(*arguments, **keywords):
        average = make(*arguments, **keywords)

        def noted(grads, *others, **named):
            note(grads)
            return average(grads, *others, **named)

        return noted

    vars(horovod)["_make_allreduce_grads_fn"] = make_noted
    return True


def declared_process_sets(hvd: types.ModuleType) -> dict[int, list[int]]:
    """Returns the members of every process set by its number; 0 is the world (`mpi_ops._basics`, Horovod 0.28)."""
    found = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    return {number: list(members) for number, members in found.items()}


def process_set(hvd: types.ModuleType, number: int, members: Sequence[int]) -> Any:
    """Returns the process set with this number in Horovod (`ProcessSet.process_set_id`, Horovod 0.28)."""
    found = hvd.ProcessSet(members)
    found.process_set_id = number
    return found


def import_launcher() -> None:
    """Imports the modules of the functions below; a broken installation can raise anything."""
    from horovod.runner import gloo_run  # noqa: F401
    from horovod.runner.common.util import hosts  # noqa: F401


def assigned_slots(hosts: str, size: int) -> list:
    """Returns places of ranks on hosts, with `rank` and `hostname` (`hosts.get_host_assignments`, Horovod 0.28).

    Args:
      hosts: as in `horovodrun -H`.
      size: number of ranks.
    """
    from horovod.runner.common.util import hosts as util

    return util.get_host_assignments(util.parse_hosts(hosts), size)


def variables_of_rank(slot: Any, address: str, port: int, interfaces: Sequence[str]) -> dict[str, Any]:
    """Returns the variables by which a rank finds its peers (`gloo_run.create_run_env_vars`, Horovod 0.28).

    Args:
      slot: one of `assigned_slots`.
      address, port: of the key-value server.
      interfaces: names of the network interfaces for Gloo.
    """
    from horovod.runner import gloo_run

    return {**gloo_run.create_run_env_vars(address, list(interfaces), port), **gloo_run.create_slot_env_vars(slot)}
