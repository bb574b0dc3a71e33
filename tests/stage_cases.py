"""Training with gradients that are fed, in each of the ways to train, to be compared with the models in numpy."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from npu_bridge import collective, stages
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_hook import broadcast_global_variables
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients.pipeline import variables_of
from tests.saved_trainings import SavedModel, SavedObjects, SavedSession
from tests.stage_models import (
    FIRST_SCALE,
    GROWS_EVERY,
    LEARNING_RATE,
    STEPS,
    WINDOW,
    gradients_of,
    in_numpy,
    start_values,
    tables_of,
)
from tests.training import as_built_by_many, assert_same_bits

tf1 = tf.compat.v1
CHAINS = (
    ("accumulate",),
    ("accumulate sums", "clip by norm"),
    ("clip locally",),
    ("clip by value",),
    ("clip by norm",),
    ("centralise",),
    ("centralise", "clip by norm", "clip by value", "clip locally", "accumulate"),
)
# What does nothing on one rank.
ADASUM_CHAINS = (("adasum",), ("accumulate", "clip locally", "adasum", "clip by norm", "centralise"))
ADASUM_OF_WEIGHTS_CHAINS = (("adasum of weights",), ("accumulate", "clip by norm", "adasum of weights", "centralise"))
PARTIAL_SYNC_CHAINS = (("partial sync",), ("accumulate", "clip by norm", "partial sync"))
# The cheap way to train meets all of them, others those in which most happens.
CHAINS_OF_WAYS = {
    "graph": CHAINS,
    "graph, tailed": CHAINS[-1:],
    "function": (CHAINS[1], CHAINS[-1]),
    "fit, legacy": CHAINS[-1:],
    "fit, current": CHAINS[-1:],
}


def made(chain):
    """The stages of a chain, in the order of its names."""
    return stages.from_config({"stages": tables_of(chain)})


def _is_apart(chain):
    """True when ranks keep something for themselves."""
    return any(name.split()[0] in ("partial", "accumulate", "top", "threshold") for name in chain)


def dynamic():
    return ExponentialUpdateLossScaleManager(FIRST_SCALE, GROWS_EVERY, 1, 2, 0.5)


def loss_of(variables, grads):
    """A loss whose gradients are `grads`, whatever the variables."""
    read = tf.gather(variables["table"], grads["rows"])
    products = [variables["kernel"] * grads["kernel"], variables["vector"] * grads["vector"], read * grads["table"]]
    return tf.add_n([tf.reduce_sum(product) for product in products])


class InGraph(SavedSession):
    """A TF 1 graph with `NPUOptimizer`; `checkpoint` is a path that other graphs can go on from."""

    def __init__(self, chain, is_tailing=False, name="stages"):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.variables = {
                name: tf1.get_variable(name, initializer=value, use_resource=name != "vector")
                for name, value in start_values().items()
            }
            self._fed = {key: tf1.placeholder(value.dtype, value.shape) for key, value in gradients_of(0, 1)[0].items()}
            self.count = tf1.train.get_or_create_global_step()
            manager = dynamic()
            inner = tf1.train.GradientDescentOptimizer(LEARNING_RATE)
            optimizer = NPUOptimizer(inner, manager, True, True, is_tailing, name=name, stages=made(chain))
            self._scale = manager.get_loss_scale()
            self._train_op = optimizer.minimize(loss_of(self.variables, self._fed), self.count)
            self._sync_op = stages.sync_all(optimizer) if _is_apart(chain) else None
            self.saver = tf1.train.Saver()
            self.session = tf1.Session(config=as_built_by_many())
            self.session.run(tf1.global_variables_initializer())
            self.all_variables = tf1.global_variables()

    def train(self, fed):
        feeds = [{self._fed[key]: value for key, value in grads.items()} for grads in fed]
        return [float(self.session.run([self._scale, self._train_op], feed)[0]) for feed in feeds]

    def sync(self):
        self.session.run(self._sync_op)

    def broadcast(self):
        with self.graph.as_default():
            self.session.run(broadcast_global_variables(0))


class InFunction(SavedObjects):
    """A `tf.function` around a `tf.GradientTape`, with a pipeline."""

    def __init__(self, chain, name="stages_in_function"):
        self.variables = {key: tf.Variable(value, name=key) for key, value in start_values().items()}
        self._manager = dynamic()
        self.optimizer = tf.keras.optimizers.legacy.SGD(LEARNING_RATE)
        self._pipeline = stages.pipeline(
            name, self._manager, is_distributed=True, stages=made(chain), inner=self.optimizer
        )
        self._step = tf.function(self._step_of, autograph=False)
        self.checkpoint = tf.train.Checkpoint(optimizer=self.optimizer, **self.variables, **self._pipeline.state())

    def _step_of(self, grads):
        step = self._pipeline.begin()
        with tf.GradientTape() as tape:
            loss = self._pipeline.scale(loss_of(self.variables, grads), step)
        variables = list(self.variables.values())
        pairs = self._pipeline.combine(step, zip(tape.gradient(loss, variables), variables))
        self._pipeline.apply(step, lambda: self.optimizer.apply_gradients(pairs))
        return step.loss_scale

    def train(self, fed):
        return [float(self._step({key: tf.constant(value) for key, value in grads.items()})) for grads in fed]

    def everything(self):
        state = {variable.name: variable.numpy() for variable in variables_of(self._pipeline.state())}
        return {**self.values(), **state}

    def sync(self):
        stages.sync_all(self._pipeline)


class InFit(SavedModel):
    """Keras `fit` with `npu_keras_optimizer`."""

    def __init__(self, chain, generation=tf.keras.optimizers.legacy):
        self.model = FedModel()
        self.variables = self.model.fed_variables
        self.optimizer = npu_keras_optimizer(generation.SGD(LEARNING_RATE), dynamic(), stages=made(chain))
        self.model.compile(self.optimizer, loss=lambda _, product: product)
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer)

    def train(self, fed):
        inputs = {key: np.stack([grads[key] for grads in fed]) for key in fed[0]}
        return self.fit(inputs, np.zeros([len(fed), 1], np.float32), batch_size=1)

    def sync(self):
        stages.sync_all(self.optimizer)


class FedModel(tf.keras.Model):
    """The sum of products of its variables with what it is fed, for a batch of one."""

    def __init__(self):
        super().__init__()
        self.fed_variables = {
            key: self.add_weight(key, value.shape, initializer=tf.keras.initializers.Constant(value))
            for key, value in start_values().items()
        }

    def call(self, inputs):
        grads = {key: value[0] for key, value in inputs.items()}
        return tf.reshape(loss_of(self.fed_variables, grads), [1, 1])


WAYS = {
    "graph": InGraph,
    "graph, tailed": functools.partial(InGraph, is_tailing=True),
    "function": InFunction,
    "fit, legacy": InFit,
    "fit, current": functools.partial(InFit, generation=tf.keras.optimizers),
}


def trained(way, chain):
    """What `in_numpy` gives, of real training on this rank, and every variable that is left."""
    training = WAYS[way](chain)
    scales = training.train(gradients_of(collective.current().rank))
    return training.values(), scales, training.updates(), training.everything()


def assert_equals_numpy(way, chain, results):
    """Results of `trained`, by rank, against the model."""
    model = in_numpy(chain, len(results))
    assert 0 < model.updates < STEPS
    for rank, (our_values, our_scales, our_updates, everything) in enumerate(results):
        where = f"{way}, {chain}, rank {rank}"
        assert our_scales == model.scales, where
        assert our_updates == model.updates, where
        assert_close(our_values, model.values[rank], where)
        for name in model.alike:
            assert np.array_equal(our_values[name], results[0][0][name]), f"{where}: {name} differs between ranks"
        if not way.startswith("fit"):  # whose variables are known by number
            assert_close(kept_in(everything, "not_sent"), model.residuals[rank], where)
            assert_close(kept_in(everything, "accumulated"), model.sums[rank], where)


def assert_close(actual, expected, where):
    """Arrays by name; float32 against float64, whatever happened to them in all steps."""
    assert set(actual) == set(expected), where
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=2e-5, atol=2e-5, err_msg=f"{where}: {name}")


def kept_in(everything, folder):
    """What stages keep for each variable, by the variable's name without scopes."""
    found = {name.partition(":")[0]: value for name, value in everything.items() if folder + "/" in name}
    own = {name: value for name, value in found.items() if "of_ranks" not in name and not name.endswith("_rows")}
    return {name.rpartition("/")[2]: value for name, value in own.items()}


def resumed(way, chain, folder):
    """Every variable after training in one go, after a restart from rank 0's checkpoint, and before the restart."""
    ranks = collective.current()
    fed = gradients_of(ranks.rank, 16)
    stop = 10
    assert stop % WINDOW
    whole, before, after = (WAYS[way](chain) for _ in range(3))
    whole.train(fed)
    before.train(fed[:stop])
    left = before.everything()
    before.sync()
    path = before.save(f"{folder}/{way}_{ranks.rank}")
    ranks.exchange([0], f"saved_{list(WAYS).index(way)}_{len(chain)}")
    after.restore(path.replace(f"{way}_{ranks.rank}", f"{way}_0"))
    after.train(fed[stop:])
    before.train(fed[stop:])
    assert_same_bits(before.everything(), whole.everything())
    return whole.everything(), after.everything(), left
