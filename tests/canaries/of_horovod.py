"""Canaries of `npu_bridge/base/horovod_internals.py`."""

from __future__ import annotations

import importlib

import tensorflow as tf

from npu_bridge.base import horovod_internals
from tests.canaries import RANK_CANARIES, canary_of, expect, kept


@canary_of(horovod_internals.wrap_init)
def _():
    basics = importlib.import_module(horovod_internals.BASICS_MODULE)
    before, seen = basics.HorovodBasics.init, []
    with kept(basics.HorovodBasics, "init"):
        horovod_internals.wrap_init(basics, lambda init: seen.append(init) or (lambda self: "changed"))
        expect(basics.HorovodBasics.init(None) == "changed" and seen == [before], "the method did not change")


@canary_of(horovod_internals.call_before_collectives, on_ranks=True)
def _():
    operators = importlib.import_module(horovod_internals.OPERATORS_MODULE)
    before, seen = {**vars(operators.MPI_LIB)}, []
    expect(horovod_internals.call_before_collectives(operators, seen.append), "the module is not complete")
    try:
        operators.broadcast(tf.constant(1.0), 0)
        expect(not seen, "a broadcast counts")
        operators._allreduce(tf.constant(1.0))
        operators._grouped_allreduce([tf.constant(1.0)])
        operators.allgather(tf.constant([1.0]))
        operators.alltoall(tf.zeros([operators.size()]))
        operators._reducescatter(tf.zeros([operators.size()]))
        expect(len(seen) == 5, f"{len(seen)} of 5 exchanges were noted")
        sizes = [sum(tensor.shape.num_elements() for tensor in tf.nest.flatten(tensors)) for tensors in seen]
        expect(sizes == [1, 1, 1, operators.size(), operators.size()], f"tensors of {sizes} elements were noted")
    finally:
        vars(operators.MPI_LIB).update(before)


@canary_of(horovod_internals.call_before_averaging, on_ranks=True)
def _():
    horovod = importlib.import_module(horovod_internals.MODULE)
    seen, weight = [], tf.Variable([1.0, 2.0])
    with kept(horovod, "_make_allreduce_grads_fn"):
        expect(horovod_internals.call_before_averaging(horovod, seen.append), "the module is not complete")
        for _ in range(2):
            with horovod.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(weight)
            (gradient,) = tape.gradient(loss, [weight])
            expect(gradient.numpy().tolist() == [1.0, 1.0], "there is another average")
        expect([[grad.shape for grad in grads] for grads in seen] == [[(2,)], [(2,)]], f"{seen} was noted")


@canary_of(horovod_internals.declared_process_sets, horovod_internals.process_set, on_ranks=True)
def _():
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from npu_bridge import collective

    size = collective.current().size
    expect(horovod_internals.declared_process_sets(hvd)[0] == list(range(size)), "the world has another number")
    world = horovod_internals.process_set(hvd, 0, range(size))
    total = hvd.allreduce(tf.constant(1.0), op=hvd.Sum, process_set=world, name="canary_of_internals")
    expect(float(total) == size, f"the sum over {size} ranks is {float(total)}")


def run_on_rank():
    """Runs the canaries that need ranks; returns what failed, by function."""
    failed = {}
    for function, (check,) in RANK_CANARIES.items():
        try:
            check()
        except Exception as error:  # whatever another version raises
            failed[function.__name__] = f"{type(error).__name__}: {error}"
    return failed
