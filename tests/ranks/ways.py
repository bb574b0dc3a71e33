"""The ways to train on several ranks with a loss scale whose tail can be optimised; and sessions to train in."""

from __future__ import annotations

import contextlib
import functools
import logging

import tensorflow as tf

from npu_bridge.collective.checks.agreement import RanksDisagreeError
from npu_bridge.estimator.npu.npu_helpers import npu_config_proto
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import (
    NPUDistributedOptimizer,
    NPUOptimizer,
    npu_allreduce,
    npu_distributed_optimizer_wrapper,
)
from npu_bridge.estimator.npu.npu_session import decorate_sessions
from npu_bridge.gradients import Pipeline, PipelineOptimizer
from npu_bridge.gradients.graph_mode import classic_control_flow
from npu_bridge.gradients.inner.families import adapt_optimizer
from tests.once import forget_what_was_said

tf1 = tf.compat.v1
FIRST_SCALE = 2.0**10
WIRES = ("none", "float16")


def in_one(optimizer, wire, name, is_tailing):
    manager, scale = _our_scale()
    return NPUOptimizer(optimizer, manager, True, True, is_tailing, name=name, wire=wire), scale


def in_two(optimizer, wire, name, is_tailing):
    del is_tailing  # the pass does it
    manager, scale = _our_scale()
    return NPULossScaleOptimizer(NPUDistributedOptimizer(optimizer, name=name, wire=wire), manager, True), scale


def scale_outside(optimizer, wire, name, is_tailing):
    del is_tailing
    scale = _stock_scale()
    distributed = horovod(_of_tf1(optimizer, name), wire, name)
    return tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(distributed, scale), scale()


def scale_inside(optimizer, wire, name, is_tailing):
    del is_tailing
    scale = _stock_scale()
    scaled = tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(_of_tf1(optimizer, name), scale)
    return horovod(scaled, wire, name), scale()


# Functions of an optimizer, a wire format, a name that is unique in the graph and whether the tail is optimised. They
# give what trains, and its loss scale.
WAYS = {
    "NPUOptimizer": in_one,
    "NPULossScaleOptimizer": in_two,
    "scale outside": scale_outside,
    "scale inside": scale_inside,
}


def _our_scale():
    manager = ExponentialUpdateLossScaleManager(FIRST_SCALE, 4, 1, 2, 0.5)
    return manager, manager.get_loss_scale()


def _stock_scale():
    return tf1.mixed_precision.DynamicLossScale(FIRST_SCALE, increment_period=4)


def _of_tf1(optimizer, name):
    """Makes an optimizer one of TF 1: in a graph, stock wrappers refuse Keras optimizers."""
    if isinstance(optimizer, tf1.train.Optimizer):
        return optimizer
    return PipelineOptimizer(optimizer, Pipeline([], adapt_optimizer(optimizer, name)), f"{name}_inner")


def horovod(optimizer, wire, name):
    import horovod.tensorflow as hvd

    hvd.init()
    compression = hvd.Compression.fp16 if wire == "float16" else hvd.Compression.none
    return hvd.DistributedOptimizer(optimizer, name=name, compression=compression)


RATE = 0.5


def slow_scale():
    """Returns a manager of a loss scale that moves with the second step."""
    return ExponentialUpdateLossScaleManager(8.0, 2)


def momentum():
    return tf1.train.MomentumOptimizer(RATE, 0.0)


def _by_hand(loss, variables):
    return momentum().apply_gradients(zip(npu_allreduce(tf.gradients(loss, variables)), variables))


# How a script trains in a TF 1 graph: makes the step of a loss and its variables.
TRAINERS = {
    "one wrapper": lambda loss, v: NPUOptimizer(momentum(), is_distributed=True).minimize(loss, var_list=v),
    "loss scale": lambda loss, v: NPUOptimizer(momentum(), slow_scale(), True, True, True).minimize(loss, var_list=v),
    "two wrappers": lambda loss, v: NPULossScaleOptimizer(
        NPUDistributedOptimizer(momentum()), slow_scale(), True
    ).minimize(loss, var_list=v),
    "rounded": lambda loss, v: NPUDistributedOptimizer(momentum(), wire="float16").minimize(loss, var_list=v),
    "sharded": lambda loss, v: NPUDistributedOptimizer(momentum(), True).minimize(loss, var_list=v),
    "in place": lambda loss, v: npu_distributed_optimizer_wrapper(momentum()).minimize(loss, var_list=v),
    "by hand": _by_hand,
    "Keras inside": lambda loss, v: NPUDistributedOptimizer(tf.keras.optimizers.SGD(RATE)).minimize(loss, var_list=v),
}


def control_flow(is_classic):
    """Makes conditions in the block be built as in TF 1, or as in TensorFlow 2."""
    return classic_control_flow() if is_classic else contextlib.nullcontext()


def settings(is_tailing):
    """Returns settings of a session whose map switches tail optimisation on or off."""
    decorate_sessions()
    config = npu_config_proto()
    (entry,) = config.graph_options.rewrite_options.custom_optimizers
    entry.parameter_map["is_tailing_optimization"].b = is_tailing
    return config


def open_session(is_tailing):
    return tf1.Session(config=settings(is_tailing))


@contextlib.contextmanager
def started_session():
    """Opens a session in which all variables have their initial values."""
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        yield session


class LinesBySteps(logging.Handler):
    """Keeps the lines of a log, each with the number of earlier steps, which is counted by others."""

    def __init__(self, name):
        super().__init__()
        self._log, self.lines, self.steps = logging.getLogger(name), [], 0

    def emit(self, record):
        self.lines.append((self.steps, record.getMessage()))

    def __enter__(self):
        forget_what_was_said()
        self._log.addHandler(self)
        return self

    def __exit__(self, *_):
        self._log.removeHandler(self)


def tells_disagreement(function):
    """Makes a function return what is said where ranks disagree, else None."""

    @functools.wraps(function)
    def run(*arguments):
        try:
            function(*arguments)
        except RanksDisagreeError as error:
            return str(error)

    return run


class AtEnd(tf.estimator.SessionRunHook):
    """Keeps what a session holds when it ends: `values` of all variables by their names."""

    def end(self, session):
        self.values = session.run({variable.name: variable for variable in tf1.global_variables()})


class StartAndEnd(tf.estimator.SessionRunHook):
    """Keeps the first trained variable, which is a number, as a training begins and ends: `seen`."""

    def __init__(self):
        self.seen = []

    def begin(self):
        self._weight = tf1.trainable_variables()[0]

    def after_create_session(self, session, coord):
        self.seen.append(float(session.run(self._weight)))

    def end(self, session):
        self.after_create_session(session, None)


class Named(tf.estimator.SessionRunHook):
    """Writes its name into a log when it begins."""

    def __init__(self, name, log):
        self._name, self._log = name, log

    def begin(self):
        self._log.append(self._name)

    def __deepcopy__(self, memo):  # an Estimator copies its params
        return self


def log_begins(patch, log, *hook_classes):
    """Makes hooks of some classes do so, too."""
    for hook_class in hook_classes:

        def begin(self, of_class=hook_class.begin, name=hook_class.__name__):
            log.append(name)
            of_class(self)

        patch.setattr(hook_class, "begin", begin)
