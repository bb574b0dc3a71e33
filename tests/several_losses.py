"""Training with two losses whose gradients are fed, in each of the ways to train, and what numpy makes of them."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from npu_bridge import collective, stages
from npu_bridge.amp.loss_scale import DynamicLossScaleManager
from npu_bridge.amp.scaling import scale_loss, unscaled_gradients
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer

tf1 = tf.compat.v1
STEPS, RATE = 16, 0.25
FIRST_SCALES, WINDOWS = (2.0**10, 2.0**3), (4, 3)
# By loss, rank and step, what is put into a gradient.
POISONS = {(0, 0, 3): np.inf, (1, 1, 6): np.nan, (1, 0, 7): -np.inf, (0, 1, 9): np.inf, (1, 0, 9): np.nan}
SHAPES = {"kernel": (3, 2), "vector": (2,), "table": (5, 2)}


def start_values():
    random = np.random.RandomState(7)
    return {name: random.randn(*shape).astype(np.float32) for name, shape in SHAPES.items()}


def fed_to(rank):
    """For each step a dict of what both losses are made of: the second has no `vector`."""
    random = np.random.RandomState(rank)
    fed = []
    for step in range(STEPS):
        grads = {}
        for loss in (0, 1):
            grads[f"kernel_{loss}"] = random.randn(3, 2).astype(np.float32)
            grads[f"rows_{loss}"] = random.randint(0, 5, 4)
            grads[f"table_{loss}"] = random.randn(4, 2).astype(np.float32)
            if (loss, rank, step) in POISONS:
                grads[f"table_{loss}"][1, 1] = POISONS[loss, rank, step]
        grads["vector_0"] = random.randn(2).astype(np.float32)
        fed.append(grads)
    return fed


def losses_of(variables, grads):
    """Two losses whose gradients are those that are fed, whatever the variables."""
    losses = []
    for loss in (0, 1):
        read = tf.gather(variables["table"], grads[f"rows_{loss}"])
        sums = [variables["kernel"] * grads[f"kernel_{loss}"], read * grads[f"table_{loss}"]]
        sums += [variables["vector"] * grads["vector_0"]] if loss == 0 else []
        losses.append(tf.add_n([tf.reduce_sum(each) for each in sums]))
    return losses


def managers():
    """One of each kind, that move by the same rule."""
    return [
        DynamicLossScaleManager.apex(FIRST_SCALES[0], scale_window=WINDOWS[0]),
        ExponentialUpdateLossScaleManager(FIRST_SCALES[1], WINDOWS[1], 1, 2, 0.5),
    ]


def one_manager():
    return FixedLossScaleManager(FIRST_SCALES[1])


def in_numpy(ranks):
    """The variables after each step, and the scales that it used."""
    values = {name: value.astype(np.float64) for name, value in start_values().items()}
    scales, good, trace = list(FIRST_SCALES), [0, 0], []
    fed = [fed_to(rank) for rank in range(ranks)]
    for step in range(STEPS):
        used = tuple(scales)
        bad = [any((loss, rank, step) in POISONS for rank in range(ranks)) for loss in (0, 1)]
        if not any(bad):
            for grads in (fed[rank][step] for rank in range(ranks)):
                for loss in (0, 1):
                    table = np.zeros(SHAPES["table"])
                    np.add.at(table, grads[f"rows_{loss}"], grads[f"table_{loss}"])
                    values["table"] = values["table"] - RATE * table / ranks
                    values["kernel"] = values["kernel"] - RATE * grads[f"kernel_{loss}"].astype(np.float64) / ranks
                values["vector"] = values["vector"] - RATE * grads["vector_0"].astype(np.float64) / ranks
        for loss in (0, 1):
            good[loss] = 0 if bad[loss] else good[loss] + 1
            if bad[loss]:
                scales[loss] /= 2
            elif good[loss] == WINDOWS[loss]:
                scales[loss], good[loss] = scales[loss] * 2, 0
        trace.append((dict(values), used, any(bad)))
    return trace


def whole_optimizer(inner, given, is_tailing=False, added=()):
    return NPUOptimizer(inner, given, True, True, is_tailing, name="several", stages=added)


def sharded_optimizer(inner, given):
    shared = NPUDistributedOptimizer(inner, is_weight_update_sharding=True, name="several")
    return NPULossScaleOptimizer(shared, given, is_distributed=True)


def in_graph(make=whole_optimizer, is_sum=False):
    """`NPUOptimizer.compute_gradients` of a list; with `is_sum` of its sum, which has one loss scale."""
    with tf.Graph().as_default(), tf1.Session() as session:
        variables = {
            name: tf1.get_variable(name, initializer=value, use_resource=name != "vector")
            for name, value in start_values().items()
        }
        fed = {key: tf1.placeholder(value.dtype, value.shape) for key, value in fed_to(0)[0].items()}
        optimizer = make(tf1.train.GradientDescentOptimizer(RATE), one_manager() if is_sum else managers())
        losses = losses_of(variables, fed)
        pairs = optimizer.compute_gradients(tf.add_n(losses) if is_sum else losses)
        train_op = optimizer.apply_gradients(pairs, tf1.train.get_or_create_global_step())
        session.run(tf1.global_variables_initializer())
        trace = []
        for grads in fed_to(collective.current().rank):
            fetches = {"train": train_op, "report": optimizer.last_step, "losses": losses}
            results = session.run(fetches, {fed[key]: value for key, value in grads.items()})
            trace.append((session.run(variables), results["report"], results["losses"]))
        return trace


def in_loop(generation, is_function, added=(), is_sum=False):
    """`scale_loss` around two passes of one tape; with `is_sum` around one."""
    variables = {name: tf.Variable(value, name=name) for name, value in start_values().items()}
    optimizer = npu_keras_optimizer(generation.SGD(RATE), one_manager() if is_sum else managers(), stages=added)

    def train(grads):
        with tf.GradientTape(persistent=True) as tape:
            losses = losses_of(variables, grads)
            losses = [tf.add_n(losses)] if is_sum else losses
        for loss_id, loss in enumerate(losses):
            with scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                scaled.backward(tape, list(variables.values()))
        optimizer.apply_gradients(unscaled_gradients(optimizer))
        return losses

    step = tf.function(train) if is_function else train
    trace = []
    for grads in fed_to(collective.current().rank):
        losses = step({key: tf.constant(value) for key, value in grads.items()})
        values = {name: variable.numpy() for name, variable in variables.items()}
        trace.append((values, optimizer.last_step, [float(loss) for loss in losses]))
    return trace


def in_eager_loop_of_tf1_optimizer():
    variables = {name: tf.Variable(value, name=name) for name, value in start_values().items()}
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(RATE), managers(), True, True, name="eager")
    trace = []
    for grads in fed_to(collective.current().rank):
        losses = [lambda number=number, grads=grads: losses_of(variables, grads)[number] for number in (0, 1)]
        pairs = optimizer.compute_gradients(losses, list(variables.values()))
        optimizer.apply_gradients(pairs)
        report = tf.nest.map_structure(lambda tensor: tensor.numpy().item(), optimizer.last_step)
        trace.append(({name: variable.numpy() for name, variable in variables.items()}, report, list(report.loss)))
    return trace


WAYS = {
    "graph": in_graph,
    "graph, tailed": lambda: in_graph(functools.partial(whole_optimizer, is_tailing=True)),
    "function, legacy": lambda: in_loop(tf.keras.optimizers.legacy, is_function=True),
    "function, current": lambda: in_loop(tf.keras.optimizers, is_function=True),
    "eager, current": lambda: in_loop(tf.keras.optimizers, is_function=False),
    "eager, of TF 1": in_eager_loop_of_tf1_optimizer,
}


FREEZING = {"groups": [["kernel"], ["vector"]], "kind": "explicit", "sequence": [0, 1]}
TOGETHER = {
    "freeze": lambda: [stages.Freeze(FREEZING)],
    "top k": lambda: [stages.TopK(0.5)],
    "adasum": lambda: [stages.Adasum()],
    "adasum of weights": lambda: [stages.Adasum(on="weights")],
    "partial sync": lambda: [stages.PartialSync(1)],
}


def trained_with_stages():
    """On a rank: the traces of training by two losses and by their sum, in one way with one of these stages."""
    makers = {name: functools.partial(whole_optimizer, added=made()) for name, made in TOGETHER.items()}
    makers["sharding"] = sharded_optimizer
    found = {("graph", name): (in_graph(make), in_graph(make, is_sum=True)) for name, make in makers.items()}
    for name in ("freeze", "adasum of weights"):
        of_kinds = [in_loop(tf.keras.optimizers, True, TOGETHER[name](), is_sum) for is_sum in (False, True)]
        found["function", name] = tuple(of_kinds)
    return found


def assert_like_one_loss(results):
    """Results of `trained_with_stages`, by rank: losses with a scale each train as their sum does."""
    expected = in_numpy(len(results))
    for rank, result in enumerate(results):
        for case, (several, one) in result.items():
            before = start_values()
            for step, ((values, report, _), (of_sum, report_of_sum, _), (_, scales, is_bad)) in enumerate(
                zip(several, one, expected)
            ):
                where = f"{case}, rank {rank}, step {step}"
                assert tuple(report.loss_scale) == scales, where
                assert bool(report.overflow) == bool(report_of_sum.overflow) == is_bad, where
                for name, value in values.items():
                    np.testing.assert_allclose(value, of_sum[name], rtol=2e-5, atol=2e-5, err_msg=f"{where}: {name}")
                    assert not is_bad or value.tobytes() == before[name].tobytes(), f"{where}: {name} has changed"
                before = values
            assert all(np.any(value != start_values()[name]) for name, value in before.items()), case


def trained(ways):
    """On a rank: the trace of training in each of these ways."""
    return {way: WAYS[way]() for way in ways}


def assert_equals_numpy(traces):
    """Traces of one way, by rank, against the model."""
    expected = in_numpy(len(traces))
    assert {is_bad for _, _, is_bad in expected} == {True, False}
    for rank, trace in enumerate(traces):
        before = start_values()
        for step, ((values, report, losses), (model, scales, is_bad)) in enumerate(zip(trace, expected)):
            where = f"rank {rank}, step {step}"
            assert tuple(report.loss_scale) == scales, where
            assert bool(report.overflow) == is_bad, where
            np.testing.assert_allclose(report.loss, losses, rtol=1e-6, err_msg=where)
            for name, value in values.items():
                np.testing.assert_allclose(value, model[name], rtol=2e-5, atol=2e-5, err_msg=f"{where}: {name}")
                assert not is_bad or value.tobytes() == before[name].tobytes(), f"{where}: {name} has changed"
                assert value.tobytes() == traces[0][step][0][name].tobytes(), f"{where}: {name} differs between ranks"
            before = values
