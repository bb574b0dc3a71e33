"""Quasi-Newton steps in a subspace: their arithmetic against numpy, in graphs and functions, on 1 and 2 ranks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import boost, collective
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.optimizers.subspace.newton import next_inverse_hessian
from tests.ranks.ways import started_session

tf1 = tf.compat.v1
SHAPES = {"first": (2, 3), "second": (4,)}
COUNT = 10


def orthonormal(k, n=COUNT, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(n, k)))[0].T.astype(np.float32)


def quadratic(seed=1, largest=1.0, smallest=0.1):
    """Returns the matrix of a convex quadratic function, and a start."""
    random = np.random.default_rng(seed)
    turned = orthonormal(COUNT, COUNT, seed).astype(np.float64)
    matrix = turned.T @ np.diag(np.linspace(smallest, largest, COUNT)) @ turned
    return matrix, random.normal(size=COUNT)


def loss_of(flat, matrix):
    return 0.5 * tf.tensordot(flat, tf.linalg.matvec(tf.constant(matrix, tf.float32), flat), 1)


def flat_of(variables):
    return tf.concat([tf.reshape(variable, [-1]) for variable in variables], axis=0)


def starts(start):
    return {"first": start[:6].reshape(2, 3).astype(np.float32), "second": start[6:].astype(np.float32)}


class NumpyModel:
    """The same steps in numpy, float64; `losses` holds the loss before each step."""

    def __init__(self, rows, rho=0.55, gamma=0.9, alpha=0.001, sigma=0.4, trials=2):
        self.rows = rows.astype(np.float64)
        self.numbers = rho, gamma, alpha, sigma, trials
        self.inverse = np.eye(len(rows))
        self.before = self.last = None
        self.momentum = 0.0
        self.losses, self.rates = [], []

    def step(self, point, loss, gradient):
        rho, gamma, alpha, sigma, trials = self.numbers
        grad = gradient(point)
        c = self.rows @ grad
        inverse = self.inverse
        if self.before is not None and (c - self.before) @ self.last > 1e-20:
            inverse = numpy_bfgs(inverse, c - self.before, self.last)
        way = -inverse @ c
        direction = self.rows.T @ way
        accepted = 0.0
        for number in range(trials):
            if loss(point + rho**number * direction) < loss(point) + sigma * rho**number * (c @ way):
                accepted = rho**number
                self.inverse, self.before, self.last = inverse, c, accepted * way
                break
        self.momentum = gamma * self.momentum + grad - self.rows.T @ c
        self.losses.append(loss(point))
        self.rates.append(accepted)
        return point + accepted * direction - alpha * self.momentum


def numpy_bfgs(inverse, change, step):
    product = change @ step
    turned = np.eye(len(step)) - np.outer(change, step) / product
    return turned.T @ inverse @ turned + np.outer(step, step) / product


def numpy_run(model, matrix, start, steps):
    point = start.astype(np.float64)
    for _ in range(steps):
        point = model.step(point, lambda x: 0.5 * x @ matrix @ x, lambda x: matrix @ x)
    return point


def trained_in_graph(wrap, matrix, start, steps, shift=0.0, **arguments):
    """Weights, losses and rates after some steps in a session; `wrap` puts optimizers around the one given to it."""
    with tf.Graph().as_default():
        variables = [tf1.get_variable(name, initializer=value) for name, value in starts(start).items()]
        newton = boost.SubspaceNewton(**arguments)
        loss = loss_of(flat_of(variables) + shift, matrix)
        train_op = wrap(newton).minimize(loss, tf1.train.get_or_create_global_step())
        history = []
        with started_session() as session:
            for _ in range(steps):
                before = session.run(loss)
                session.run(train_op)
                history.append((before, session.run(newton.rate)))
            assert session.run(tf1.train.get_global_step()) == steps
            return session.run(flat_of(variables)), *map(list, zip(*history))


def trained_in_function(wrap, matrix, start, steps, shift=0.0, is_eager=False, **arguments):
    variables = [tf.Variable(value, name=name) for name, value in starts(start).items()]
    newton = boost.SubspaceNewton(**arguments)
    optimizer = wrap(newton)

    def train():
        optimizer.minimize(lambda: loss_of(flat_of(variables) + shift, matrix), var_list=variables)

    call, history = train if is_eager else tf.function(train), []
    for _ in range(steps):
        before = float(loss_of(flat_of(variables) + shift, matrix))
        call()
        history.append((before, float(newton.rate)))
    return flat_of(variables).numpy(), *map(list, zip(*history))


def unwrapped(newton):
    return newton


def scaled(newton):
    return NPUOptimizer(newton, FixedLossScaleManager(1024.0), is_distributed=True, is_loss_scale=True)


def make_basis(k, names=tuple(SHAPES)):
    sizes = {"first": 6, "second": 4}
    return boost.Basis(orthonormal(k), tuple((name, sizes[name]) for name in names))


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("train", [trained_in_graph, trained_in_function])
@pytest.mark.parametrize("wrap", [unwrapped, NPUDistributedOptimizer, scaled])
def test_steps_are_those_of_numpy(train, wrap):
    """Also under loss scaling: coordinates and complement are divided by the scale once, and both of them."""
    matrix, start = quadratic(largest=1.4)
    model = NumpyModel(orthonormal(4), alpha=0.05)
    expected = numpy_run(model, matrix, start, 12)
    weights, losses, rates = train(wrap, matrix, start, 12, basis=make_basis(4), alpha=0.05)
    np.testing.assert_allclose(rates, model.rates, rtol=1e-6)
    assert {0.0, 1.0} <= set(model.rates)  # steps that are accepted and steps that are not
    np.testing.assert_allclose(losses, model.losses, rtol=2e-4)
    np.testing.assert_allclose(weights, expected, rtol=2e-3, atol=2e-4)


def test_eager_steps_are_those_of_functions():
    matrix, start = quadratic()
    results = [
        trained_in_function(unwrapped, matrix, start, 5, is_eager=is_eager, basis=make_basis(3))
        for is_eager in (True, False)
    ]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("largest, trials", [(1.0, 2), (50.0, 30)])
def test_with_all_directions_a_quadratic_falls_monotonically_to_a_millionth(largest, trials):
    matrix, start = quadratic(largest=largest, smallest=largest / 10)
    _, losses, rates = trained_in_graph(unwrapped, matrix, start, 60, basis=make_basis(COUNT), alpha=0.0, trials=trials)
    losses = np.array(losses)
    fell = losses[: np.argmax(losses < 1e-6 * losses[0]) + 1]
    assert losses.min() < 1e-6 * losses[0]
    assert np.all(np.diff(fell) < 0), losses
    assert rates[0] > 0


def test_bfgs_is_that_of_numpy():
    random = np.random.default_rng(3)
    inverse = random.normal(size=(5, 5))
    inverse = inverse @ inverse.T
    change, step = random.normal(size=5), random.normal(size=5)
    expected = numpy_bfgs(inverse, change, step)
    np.testing.assert_allclose(next_inverse_hessian(tf.constant(inverse), change, step), expected, rtol=1e-10)
    np.testing.assert_allclose(expected @ change, step, rtol=1e-8)  # the secant equation


def test_where_no_rate_is_accepted_nothing_is_learnt_and_the_weights_return():
    matrix, start = quadratic(largest=100.0, smallest=50.0)
    variables = [tf.Variable(value, name=name) for name, value in starts(start).items()]
    newton = boost.SubspaceNewton(make_basis(3), alpha=0.0)
    evaluations = []

    def loss():
        evaluations.append(flat_of(variables).numpy())
        return loss_of(flat_of(variables), matrix)

    newton.minimize(loss, var_list=variables)
    assert len(evaluations) == 3 and not np.array_equal(evaluations[0], evaluations[1])
    np.testing.assert_array_equal(flat_of(variables), evaluations[0])
    learnt = {variable.name.partition(":")[0].rpartition("/")[2]: variable.numpy() for variable in newton.variables()}
    assert not learnt["is_started"] and learnt["rate"] == 0.0
    np.testing.assert_array_equal(learnt["inverse_hessian"], np.eye(3))


def test_trials_share_the_batch_the_masks_and_change_no_statistics(graph):
    """A loss with a random batch, dropout and batch normalisation is the same loss when it is evaluated again."""
    tf1.set_random_seed(7)
    features = tf.random.normal([8, 10])
    labels = tf.reduce_sum(features, axis=1, keepdims=True)
    kernel = tf1.get_variable("kernel", [10, 1])
    normed = tf1.layers.batch_normalization(features * 2.0 + 1.0, training=True, center=False, scale=False)
    hidden = tf.matmul(tf.nn.dropout(normed, 0.5), kernel)
    loss = tf.reduce_mean(tf.square(hidden - labels))
    newton = boost.SubspaceNewton(boost.Basis(np.eye(10, dtype=np.float32)), alpha=0.0, trials=20)
    train_op = newton.minimize(loss)
    random_ops = [op.name for op in graph.get_operations() if op.type.startswith("Random")]
    assert not [name for name in random_ops if "evaluated_again" in name]
    with started_session() as session:
        for _ in range(10):
            session.run(train_op)
            assert session.run(newton.rate) > 0  # downhill on its own batch, every time


def test_a_step_that_moves_nothing_keeps_all_bits_of_a_float64_weight():
    weight = tf.Variable([1 / 3], dtype=tf.float64)
    newton = boost.SubspaceNewton(boost.Basis(np.eye(1, dtype=np.float32)), alpha=0.0)
    newton.minimize(lambda: tf.reduce_sum(0.0 * weight), var_list=[weight])
    assert weight.numpy().tolist() == [1 / 3]


def test_embeddings_and_reference_variables_are_trained(graph):
    with tf1.variable_scope("model", use_resource=False):
        kernel = tf1.get_variable("kernel", initializer=np.ones([2, 2], np.float32))
    table = tf1.get_variable("table", initializer=np.ones([5, 2], np.float32), use_resource=True)
    rows = tf.nn.embedding_lookup(table, tf1.placeholder_with_default([1, 3, 3], [3]))
    loss = tf.reduce_mean(tf.square(tf.matmul(rows, kernel) - 0.5))
    newton = boost.SubspaceNewton(boost.Basis(np.eye(14, dtype=np.float32)), alpha=0.0, trials=20)
    train_op = newton.minimize(loss, var_list=[kernel, table])
    with started_session() as session:
        first = session.run(loss)
        for _ in range(20):
            session.run(train_op)
        assert session.run(loss) < 1e-3 * first
        np.testing.assert_array_equal(session.run(table)[[0, 2, 4]], np.ones([3, 2]))


def loop_over(weights):
    return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x + tf.reduce_sum(weights**2)), [0, 0.0])[1]


def test_loops_are_evaluated_again_as_one_operator_and_refused_as_many(graph):
    weights = tf1.get_variable("weights", initializer=np.ones(3, np.float32), use_resource=True)
    newton = boost.SubspaceNewton(boost.Basis(np.eye(3, dtype=np.float32)), alpha=0.0, trials=20)
    loss = loop_over(weights)
    assert loss.op.type != "Exit"
    train_op = newton.minimize(loss)
    with started_session() as session:
        session.run([train_op] * 1)
        assert session.run(loss) < 9.0
    tf1.disable_control_flow_v2()
    try:
        with pytest.raises(ValueError, match="part of a loop. Train eagerly"):
            newton.minimize(loop_over(weights))
    finally:
        tf1.enable_control_flow_v2()


def model_fn(features, labels, mode, params):
    logits = tf1.layers.dense(features, 1, name="layer", kernel_initializer=tf1.ones_initializer())
    loss = tf.reduce_mean(tf.square(logits - labels))
    newton = boost.SubspaceNewton(boost.Basis(orthonormal(2, 5)), alpha=0.01)
    optimizer = NPUOptimizer(newton, FixedLossScaleManager(16.0), is_distributed=True, is_loss_scale=True)
    train_op = optimizer.minimize(loss, tf1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


@pytest.mark.slow("two estimators; the state has cases of its own")
def test_an_estimator_goes_on_where_it_stopped(tmp_path):
    """The learnt curvature is in the checkpoint; the basis is not."""

    def input_fn():
        features = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
        return tf.data.Dataset.from_tensors((features, features[:, :1] + 0.5)).repeat()

    weights = {}
    for parts in ((4,), (2, 2)):
        config = NPURunConfig(model_dir=str(tmp_path / str(len(parts))), save_checkpoints_steps=2)
        for steps in parts:
            estimator = NPUEstimator(model_fn, config=config)
            estimator.train(input_fn, steps=steps)
        names = estimator.get_variable_names()
        assert "SubspaceNewton/inverse_hessian" in names and "SubspaceNewton/basis" not in names
        weights[parts] = [estimator.get_variable_value(name) for name in sorted(names)]
    for mine, other in zip(*weights.values()):
        np.testing.assert_array_equal(mine, other)


def test_a_basis_is_one_that_was_computed():
    with pytest.raises(TypeError, match="compute_pca_basis"):
        boost.SubspaceNewton(np.eye(3))


def test_ranks_cannot_share_its_update():
    with pytest.raises(ValueError, match="is_weight_update_sharding.* got SubspaceNewton"):
        NPUDistributedOptimizer(boost.SubspaceNewton(make_basis(2)), is_weight_update_sharding=True)


def test_a_basis_of_other_variables_is_refused():
    variables = [tf.Variable([1.0] * 6, name="frist"), tf.Variable([1.0] * 4, name="second")]
    newton = boost.SubspaceNewton(make_basis(2))
    with pytest.raises(ValueError, match="differ in frist.*Check whether 'first' is its new name"):
        newton.minimize(lambda: tf.reduce_sum(flat_of(variables)), var_list=variables)
    with pytest.raises(ValueError, match="another number of values"):
        boost.SubspaceNewton(boost.Basis(orthonormal(2))).minimize(
            lambda: tf.reduce_sum(variables[0]), var_list=variables[:1]
        )


@pytest.mark.slow("several graphs")
def test_columns_follow_names_and_not_the_order_of_variables():
    matrix, start = quadratic()
    reversed_basis = boost.Basis(np.roll(orthonormal(3), 4, axis=1), (("second", 4), ("first", 6)))
    results = [
        trained_in_function(unwrapped, matrix, start, 3, basis=basis) for basis in (make_basis(3), reversed_basis)
    ]
    np.testing.assert_array_equal(results[0][0], results[1][0])


# Several ranks.


RANK_CASES = [
    (trained_in_graph, NPUDistributedOptimizer, 3),
    (trained_in_function, scaled, 3),
    (trained_in_graph, scaled, 1),
]


def on_rank():
    """Trains on a rank; the losses of ranks differ by a shift of the point at which the quadratic is computed."""
    shift = 0.3 if collective.current().rank else -0.1
    matrix, start = quadratic()
    return [train(wrap, matrix, start, 6, shift, basis=make_basis(k), alpha=0.05) for train, wrap, k in RANK_CASES]


@pytest.mark.slow("ranks share a step in test_apply.py, too")
def test_ranks_share_rows_that_they_cannot_share_equally_and_losses_are_averaged(on_ranks):
    """3 rows on 2 ranks, and one row, of which one rank has none; floor divisions would change losses and rows."""
    matrix, start = quadratic()
    of_ranks = on_ranks(2, on_rank)
    for (_, _, k), mine, other in zip(RANK_CASES, *of_ranks):
        model, point = NumpyModel(orthonormal(k), alpha=0.05), start.astype(np.float64)
        for _ in range(6):
            point = model.step(
                point,
                lambda x: np.mean([0.5 * (x + shift) @ matrix @ (x + shift) for shift in (-0.1, 0.3)]),
                lambda x: np.mean([matrix @ (x + shift) for shift in (-0.1, 0.3)], axis=0),
            )
        np.testing.assert_array_equal(mine[0], other[0])
        assert mine[2] == other[2] == pytest.approx(model.rates)
        np.testing.assert_allclose(mine[0], point, rtol=2e-3, atol=2e-4)
