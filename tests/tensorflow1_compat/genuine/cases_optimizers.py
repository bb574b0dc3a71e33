"""`tf.contrib.opt`, `mixed_precision`, `tf.train`: optimizers, schedules, loss scales, over three steps."""

from __future__ import annotations

# fmt: off
# A table: a line for each case, if it fits.
import numpy as np
import tensorflow as tf
from common import CASES, Run, case, wrong
from tensorflow.contrib.opt.python.training import sign_decay

opt, mixed, train = tf.contrib.opt, tf.contrib.mixed_precision, tf.train


def three_steps(make, resource=False, **options):
    """A dense and a sparse variable (with a repeated row) with gradients that change from step to step."""
    with tf.variable_scope("", use_resource=resource):
        step = tf.train.get_or_create_global_step()
        w, rows = tf.get_variable("w", [2, 3]), tf.get_variable("rows", [4, 2])
    wrapped = make()
    scale = 1.0 + tf.cast(step, tf.float32)
    loss = tf.reduce_sum(tf.square(w) * scale) * 0.5 + tf.reduce_sum(
        tf.sin(tf.nn.embedding_lookup(rows, [3, 1, 3])) * [[1.0, -2.0]])
    if options.pop("apply", False):
        gradients = wrapped.compute_gradients(loss, [w, rows])
        update = wrapped.apply_gradients(gradients, step, **options)
    else:
        update = wrapped.minimize(loss, step, **options)
    return Run(update, 3, [tf.identity(w), tf.identity(rows)])


def trains(name, make, *also, **options):
    key = " ".join((name,) + also)
    case(key, lambda: three_steps(make, **options))
    if key + "+" not in CASES:  # other arguments need no second kind of variables
        case(key + ": resource", lambda: three_steps(make, resource=True, **options))


def momentum(rate=0.1):
    return train.MomentumOptimizer(rate, 0.9)


for _name, _arguments in (
    ("GradientDescentOptimizer", (0.1,)), ("MomentumOptimizer", (0.1, 0.9, False, "own", True)), ("AdamOptimizer", ()),
    ("AdamOptimizer", (0.1, 0.8, 0.9, 1e-3)), ("AdagradOptimizer", (0.1,)), ("AdadeltaOptimizer", (0.1,)),
    ("RMSPropOptimizer", (0.1,)), ("RMSPropOptimizer", (0.1, 0.8, 0.5, 1e-3, False, True)),
    ("FtrlOptimizer", (0.1, -0.5, 0.1, 0.01, 0.02)), ("ProximalGradientDescentOptimizer", (0.1, 0.01, 0.02)),
    ("ProximalAdagradOptimizer", (0.1, 0.1, 0.01, 0.02)),
):
    case(f"train.{_name}: {_arguments}", lambda n=_name, a=_arguments: three_steps(lambda: getattr(train, n)(*a)))
for _name, _arguments in (
    ("AdaMaxOptimizer", ()), ("AdaMaxOptimizer", (0.1, 0.8, 0.9, 1e-3)), ("LazyAdamOptimizer", ()),
    ("LazyAdamOptimizer", (0.1, 0.8, 0.9, 1e-3)), ("NadamOptimizer", ()), ("NadamOptimizer", (0.1, 0.8, 0.9, 1e-3)),
    ("AdamWOptimizer", (0.01,)), ("AdamWOptimizer", (0.01, 0.1, 0.8)), ("MomentumWOptimizer", (0.01, 0.1, 0.9)),
    ("MomentumWOptimizer", (0.01, 0.1, 0.9, False, "own", True)), ("LARSOptimizer", (0.1,)),
    ("LARSOptimizer", (0.1, 0.8, 0.01, 0.1, 1e-3, "own", ["rows"], True)),
):
    trains("opt." + _name, lambda n=_name, a=_arguments: getattr(opt, n)(*a))
trains("opt.extend_with_decoupled_weight_decay", lambda: opt.extend_with_decoupled_weight_decay(
    train.AdagradOptimizer)(weight_decay=0.01, learning_rate=0.1))
case("opt.extend_with_decoupled_weight_decay: some", lambda: three_steps(lambda: opt.extend_with_decoupled_weight_decay(
    train.AdamOptimizer)(0.01), decay_var_list=[each for each in tf.trainable_variables() if "w" in each.name][:1]))


class Own(opt.DecoupledWeightDecayExtension, train.MomentumOptimizer):
    """An optimizer of a user with weight decay."""


trains("opt.DecoupledWeightDecayExtension", lambda: Own(weight_decay=0.01, learning_rate=0.1, momentum=0.9))
trains("opt.MovingAverageOptimizer", lambda: opt.MovingAverageOptimizer(momentum(), 0.8))
case("opt.MovingAverageOptimizer: late", lambda: three_steps(lambda: opt.MovingAverageOptimizer(
    momentum(), 0.8, num_updates=tf.train.get_global_step(), sequential_update=False)))
case("opt.MovingAverageOptimizer: saver", lambda: swapped())
trains("opt.MultitaskOptimizerWrapper", lambda: opt.MultitaskOptimizerWrapper(momentum()))
case("opt.VariableClippingOptimizer", lambda: three_steps(lambda: opt.VariableClippingOptimizer(
    momentum(), {tf.trainable_variables()[0]: [1], tf.trainable_variables()[1]: [1]}, 0.3)))
case("opt.VariableClippingOptimizer: all", lambda: three_steps(lambda: opt.VariableClippingOptimizer(
    momentum(), {tf.trainable_variables()[0]: [0, 1]}, 0.3)))
case("opt.clip_gradients_by_global_norm", lambda: opt.clip_gradients_by_global_norm(
    [(tf.constant([3.0, 4.0]), tf.get_variable("v", [2])), (tf.constant([12.0]), tf.get_variable("u", [1]))], 1.0))
case("opt.clip_gradients_by_global_norm: None", lambda: opt.clip_gradients_by_global_norm(
    [(tf.constant([3.0, 4.0]), tf.get_variable("v", [2])), (None, tf.get_variable("u", [1]))]))
for _name, _options in (("linear", {}), ("cosine", {}), ("cosine", {"num_periods": 2, "zero_after": 1}),
                        ("restart", {}), ("restart", {"num_periods": 3, "zero_after": 2})):
    case(f"opt.python.training.sign_decay.get_{_name}_decay_fn: {sorted(_options)}", lambda n=_name, o=_options: [
        getattr(sign_decay, f"get_{n}_decay_fn")(10, **o)(tf.constant(step)) for step in (0, 3, 5, 8, 12)])
wrong("opt.LARSOptimizer", lambda: opt.LARSOptimizer(0.1, momentum=-1.0))
wrong("opt.MultitaskOptimizerWrapper", lambda: opt.MultitaskOptimizerWrapper(3))
wrong("opt.MovingAverageOptimizer", lambda: opt.MovingAverageOptimizer(momentum()).swapping_saver())
case("train.ExponentialMovingAverage", lambda: averaged(train.ExponentialMovingAverage(0.5, zero_debias=True)))
case("train.ExponentialMovingAverage: steps", lambda: averaged(train.ExponentialMovingAverage(0.9, num_updates=2)))


def averaged(average):
    w = tf.get_variable("w", [3])
    loss = average.apply([w])
    with tf.control_dependencies([loss]):
        return Run(tf.assign(w, w * 1.5), 3, [average.average(w)])


def swapped():
    wrapped = opt.MovingAverageOptimizer(train.GradientDescentOptimizer(0.1))
    wrapped.minimize(tf.reduce_sum(tf.get_variable("w", [3])))
    saver = wrapped.swapping_saver()
    return sorted(name.decode() if isinstance(name, bytes) else name for name in saver._var_list)


# Schedules.
def rates(make, steps=(0, 1, 2, 5, 9, 15)):
    return [make(tf.constant(step, tf.int64)) for step in steps]


for _name, _arguments in (
    ("exponential_decay", (0.1, None, 4, 0.5)), ("exponential_decay", (0.1, None, 4, 0.5, True)),
    ("natural_exp_decay", (0.1, None, 4, 0.5)), ("inverse_time_decay", (0.1, None, 4, 0.5, True)),
    ("polynomial_decay", (0.1, None, 8)), ("polynomial_decay", (0.1, None, 4, 0.01, 2.0, True)),
    ("cosine_decay", (0.1, None, 8, 0.2)), ("cosine_decay_restarts", (0.1, None, 3, 2.0, 0.9, 0.1)),
    ("linear_cosine_decay", (0.1, None, 8, 0.5, 0.1, 0.01)), ("piecewise_constant", (None, [2, 5], [0.1, 0.2, 0.3])),
):
    case(f"train.{_name}: {_arguments}", lambda n=_name, a=_arguments: rates(lambda step: getattr(train, n)(
        *[step if each is None else each for each in a])))
case("train.noisy_linear_cosine_decay", lambda: rates(lambda step: train.noisy_linear_cosine_decay(0.1, step, 8)),
    values=False)


# Loss scales: the states after steps some of which overflow.
def scales(manager, pattern):
    step = tf.train.get_or_create_global_step()
    finite = tf.constant(pattern)[step]
    before = manager.get_loss_scale() + 0.0
    with tf.control_dependencies([before, finite]):
        with tf.control_dependencies([manager.update_loss_scale(finite)]):
            return Run([tf.assign_add(step, 1), before], len(pattern), [manager.get_loss_scale()])


_PATTERNS = ([True] * 6, [False] * 4, [True, True, False, True, False, False, True, True, True])
for _place, _pattern in enumerate(_PATTERNS):
    case(f"mixed_precision.FixedLossScaleManager: {_place}",
         lambda p=_pattern: scales(mixed.FixedLossScaleManager(128.0), p))
    for _options in ((1024.0, 2), (2.0, 3, 1, 4.0, 0.1), (2.0 ** 127, 1), (8, 2, 2, 1.5, 0.8)):
        case(f"mixed_precision.ExponentialUpdateLossScaleManager: {_place} {_options}",
             lambda p=_pattern, o=_options: scales(mixed.ExponentialUpdateLossScaleManager(*o), p))
case("mixed_precision.LossScaleManager", lambda: isinstance(mixed.FixedLossScaleManager(1.0), mixed.LossScaleManager))
wrong("mixed_precision.FixedLossScaleManager", lambda: mixed.FixedLossScaleManager(0.5))


def overflowing(make):
    """Trains with a gradient that is not finite at the second of four steps; a scale that moves is a race in 1.15."""
    step = tf.train.get_or_create_global_step()
    w = tf.get_variable("w", [3])
    bad = tf.where(tf.equal(step, 1), np.float32(np.inf), np.float32(1.0))
    wrapped = mixed.LossScaleOptimizer(momentum(), make())
    counter = tf.Variable(0, trainable=False, name="counter")
    with tf.control_dependencies([bad]):
        update = wrapped.minimize(tf.reduce_sum(tf.square(w)) * bad, counter)
    with tf.control_dependencies([update]):
        return Run(tf.assign_add(step, 1), 4, [tf.identity(w)])


case("mixed_precision.LossScaleOptimizer", lambda: overflowing(lambda: mixed.FixedLossScaleManager(64.0)))
case("estimator.clip_gradients_by_norm", lambda: three_steps(
    lambda: tf.contrib.estimator.clip_gradients_by_norm(momentum(), 0.3)))


# Training operators and gradients.
def made(**options):
    w = tf.get_variable("w", [3])
    step = tf.train.get_or_create_global_step()
    loss = tf.reduce_sum(tf.square(w)) * 2
    maker = options.pop("maker", tf.contrib.training.create_train_op)
    return Run(maker(loss, momentum(), step, **options), 3, [tf.identity(w)])


for _key, _options in (
    ("", {}), (": norm", {"transform_grads_fn": lambda pairs: tf.contrib.training.clip_gradient_norms(
        pairs, 0.5)}), (": no updates", {"update_ops": [], "summarize_gradients": True, "check_numerics": False})):
    case("training.create_train_op" + _key, lambda o=_options: made(**o))
case("slim.learning.create_train_op", lambda: made(maker=lambda loss, optimizer, step: tf.contrib.slim.learning.
                                                   create_train_op(loss, optimizer, clip_gradient_norm=0.5)))


def pairs():
    w, rows = tf.get_variable("w", [3]), tf.get_variable("rows", [4, 2])
    rows_of = tf.IndexedSlices(tf.ones([2, 2]) * 3, tf.constant([1, 3]), tf.constant([4, 2]))
    return [(tf.constant([3.0, 4, 0]), w), (rows_of, rows)]


case("training.clip_gradient_norms", lambda: tf.contrib.training.clip_gradient_norms(pairs(), 2.0))
case("training.clip_gradient_norms_fn", lambda: tf.contrib.training.clip_gradient_norms_fn(2.0)(pairs()))
case("training.multiply_gradients", lambda: tf.contrib.training.multiply_gradients(
    pairs(), {tf.trainable_variables()[0]: 0.5, tf.trainable_variables()[1]: 2.0}))
case("training.add_gradients_summaries", lambda: len(tf.contrib.training.add_gradients_summaries(pairs())))
wrong("training.multiply_gradients", lambda: tf.contrib.training.multiply_gradients(pairs(), {}))
wrong("train.MomentumOptimizer", lambda: momentum().minimize(tf.constant(1.0)))
