"""The common parts of all rules: arguments, schedules, groups, exclusions, dtypes, sparse gradients, configurations."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import optimizers
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.optimizers import keras, keras_legacy, rules, tf1
from npu_bridge.session.optimizer_numbers import optimizer_numbers
from tests.goldens.two_layers import beside_addons, tfa
from tests.ranks.ways import started_session

Halving = tf.keras.optimizers.schedules.ExponentialDecay


class TestArguments:
    def test_a_rate_is_a_number_and_betas_are_below_one(self):
        with pytest.raises(TypeError, match="SGD: learning_rate.*Expected a number"):
            keras.SGD(None)
        with pytest.raises(ValueError, match="Adam: beta_1 is out of range.*beta_1 < 1"):
            keras.Adam(beta_1=1.0)

    def test_numpy_numbers_are_numbers(self):
        assert keras.SGD(np.float32(0.5), momentum=np.int64(0)).rule.learning_rate == 0.5

    @pytest.mark.parametrize("given", [{}, {"momentum": 0.9, "dampening": 0.1}])
    def test_nesterov_needs_an_undamped_momentum(self, given):
        with pytest.raises(ValueError, match="SGD: nesterov.*momentum="):
            keras.SGD(0.1, nesterov=True, **given)

    def test_choices_and_flags_are_checked(self):
        with pytest.raises(ValueError, match="decay has an unknown value. Expected 'coupled' or 'decoupled'"):
            keras.Adam(decay="none")
        with pytest.raises(TypeError, match="amsgrad is not a boolean"):
            keras.Adam(amsgrad=1)
        with pytest.raises(ValueError, match=r"exclude_from_weight_decay cannot be read"):
            keras.LAMB(exclude_from_weight_decay=["("])

    def test_a_required_rate_is_required(self):
        with pytest.raises(TypeError, match="learning_rate"):
            keras.BertAdam()


class TestPlaces:
    def test_each_place_gets_its_kind(self):
        assert isinstance(optimizers.LAMB(0.1), tf.keras.optimizers.Optimizer)
        with tf.Graph().as_default():
            assert isinstance(optimizers.LAMB(0.1), tf.compat.v1.train.Optimizer)

    def test_from_config(self):
        made = optimizers.from_config({"rule": "LAMB", "learning_rate": 0.5, "exclude_from_weight_decay": ["bias"]})
        assert made.rule.learning_rate == 0.5 and made.rule.exclude_from_weight_decay == ("bias",)
        with pytest.raises(ValueError, match="Did you mean 'LAMB'"):
            optimizers.from_config({"rule": "LAMP"})
        with pytest.raises(ValueError, match="unknown argument 'beta1'.*Did you mean 'beta_1'"):
            optimizers.from_config({"rule": "LAMB", "beta1": 0.5})


def _trained_v1(make, gradients, shape=(2,), dtype=tf.float32, fetch=()):
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", shape, dtype, tf.compat.v1.ones_initializer())
        fed = tf.compat.v1.placeholder(dtype, shape)
        step = make().apply_gradients([(fed, variable)])
        values = []
        with started_session() as session:
            for gradient in gradients:
                session.run(step, {fed: np.full(shape, gradient)})
                values.append(session.run(variable))
        return values


class TestSchedules:
    """A hyper-parameter is read once for each update, at the number of updates before it."""

    def test_every_hyper_parameter_may_be_a_schedule(self):
        for rule in rules.ALL:
            given = {name: Halving(0.5, 2, 0.5) for name in rule.hyper_names()}
            values = _trained_v1(lambda rule=rule, given=given: getattr(tf1, rule.__name__)(**given), [1.0, 2.0])
            assert np.all(np.isfinite(values)), rule

    @pytest.mark.parametrize("face", ["tf1", "keras", "keras_legacy"])
    def test_momentum_follows_a_schedule(self, face):
        schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.0, 0.5, 0.25])
        p, v, expected = 1.0, 0.0, []
        for momentum in (0.0, 0.5, 0.25):
            v = momentum * v + 1.0
            p -= 0.1 * v
            expected.append(p)
        if face == "tf1":
            values = [value[0] for value in _trained_v1(lambda: tf1.SGD(0.1, momentum=schedule), [1.0] * 3)]
        else:
            module = {"keras": keras, "keras_legacy": keras_legacy}[face]
            optimizer, variable, values = module.SGD(0.1, momentum=schedule), tf.Variable([1.0]), []
            for _ in range(3):
                optimizer.apply_gradients([(tf.constant([1.0]), variable)])
                values.append(variable.numpy()[0])
        np.testing.assert_allclose(values, expected, rtol=1e-6)

    def test_callables_with_and_without_a_step(self):
        for rate in (lambda: 0.5, lambda step: 0.5 * tf.ones_like(step, tf.float32)):
            assert _trained_v1(lambda rate=rate: tf1.SGD(rate), [1.0])[0][0] == 0.5

    @pytest.mark.parametrize("module", [keras, keras_legacy])
    def test_keras_reads_variables_and_callables_at_each_update(self, module):
        known = tf.Variable(0.5)
        for rate in (known, lambda: known.read_value(), lambda step: tf.gather([0.5, 0.25], step)):
            optimizer, variable = module.SGD(rate), tf.Variable([1.0])
            for value in (0.5, 0.25):
                known.assign(value)
                optimizer.apply_gradients([(tf.constant([1.0]), variable)])
            assert variable.numpy()[0] == 0.25

    def test_the_rate_of_a_keras_optimizer_can_be_set(self):
        for module in (keras, keras_legacy):
            optimizer, variable = module.SGD(0.5), tf.Variable([1.0])
            optimizer.learning_rate = 0.25
            optimizer.apply_gradients([(tf.constant([1.0]), variable)])
            assert variable.numpy()[0] == 0.75

    def test_a_skipped_step_moves_no_schedule(self):
        schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.125])
        with tf.Graph().as_default():
            variable = tf.compat.v1.get_variable("v", initializer=[1.0])
            factor = tf.compat.v1.placeholder(tf.float32, [])
            optimizer = NPUOptimizer(tf1.SGD(schedule), FixedLossScaleManager(8.0), is_loss_scale=True)
            step = optimizer.minimize(tf.reduce_sum(variable) * factor)
            values = []
            with started_session() as session:
                for value in (np.inf, 1.0, np.nan, 1.0):
                    session.run(step, {factor: value})
                    values.append(session.run(variable)[0])
                count = session.run([v for v in tf.compat.v1.global_variables() if "update_count" in v.name])
        assert values == [1.0, 0.5, 0.5, 0.375]
        assert count == [2]


class TestGroups:
    GROUPS = [{"match": "bias|norm", "weight_decay": 0.0}, {"match": "^head/", "lr": 0.25}]

    def _variables(self):
        return [tf.Variable([1.0], name=name) for name in ("dense/kernel", "dense/bias", "head/kernel")]

    @pytest.mark.parametrize("is_named", [True, False])
    def test_the_first_match_wins_and_variables_can_be_named_themselves(self, is_named):
        variables = self._variables()
        groups = [{"match": variables[2:], "learning_rate": 0.0}] if is_named else self.GROUPS
        optimizer = keras.SGD(0.5, weight_decay=1.0, groups=groups)
        optimizer.apply_gradients([(tf.constant([0.0]), variable) for variable in variables])
        expected = [0.5, 0.5, 1.0] if is_named else [0.5, 1.0, 0.75]
        assert [variable.numpy()[0] for variable in variables] == expected

    def test_the_rate_of_a_group_stays_even_if_it_is_the_rate_of_the_optimizer(self):
        rate, variables = 0.25, self._variables()
        optimizer = keras.SGD(rate, groups=[{"match": "bias", "lr": rate}, {"match": "head", "weight_decay": 0.0}])
        optimizer.learning_rate = 0.5
        optimizer.apply_gradients([(tf.constant([1.0]), variable) for variable in variables])
        assert [variable.numpy()[0] for variable in variables] == [0.5, 0.75, 0.5]

    def test_a_group_without_variables_lists_near_names(self):
        optimizer = keras.SGD(0.5, groups=[{"match": "dense/kernle", "lr": 0.1}])
        with pytest.raises(ValueError, match="group 0 matches no variable.*Did you mean 'dense/kernel'"):
            optimizer.build(self._variables())

    def test_unknown_hyper_parameters_are_refused(self):
        with pytest.raises(ValueError, match="unknown hyper-parameter 'momentun'.*Did you mean 'momentum'"):
            keras.SGD(0.5, groups=[{"match": "a", "momentun": 0.1}])
        with pytest.raises(ValueError, match="out of range"):
            keras.SGD(0.5, groups=[{"match": "a", "momentum": -1}])
        with pytest.raises(ValueError, match="global norm is of all gradients.*; got learning_rate, max_grad_norm"):
            keras.SGD(0.5, groups=[{"match": "a", "rule": "BertAdam", "lr": 0.1, "max_grad_norm": 1.0}])


@beside_addons
def test_exclusions_are_those_of_tensorflow_addons():
    def trained(module, **given):
        variables = [tf.Variable([1.0, 2.0], name=name) for name in ("dense/kernel", "dense/bias", "norm/gamma")]
        optimizer = module.LAMB(0.1, weight_decay=0.5, exclude_from_weight_decay=["bias"], **given)
        for _ in range(3):
            optimizer.apply_gradients([(tf.constant([0.5, -1.0]), variable) for variable in variables])
        return [variable.numpy() for variable in variables]

    for given in ({}, {"exclude_from_layer_adaptation": ["norm"]}):
        np.testing.assert_allclose(trained(keras, **given), trained(tfa.optimizers, **given), rtol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_exclusions_by_the_method_of_keras_are_those_of_the_argument(fused):
    def trained(wrap=lambda optimizer: optimizer, excluded=False, **given):
        variables = [tf.Variable([1.0, 2.0], name=name) for name in ("dense/kernel", "dense/bias", "norm/gamma")]
        optimizer = wrap(keras.LAMB(0.1, weight_decay=0.5, fused=fused, **given))
        if excluded:
            optimizer.exclude_from_weight_decay([variables[2]], ["bias"])
        for _ in range(3):
            optimizer.apply_gradients([(tf.constant([0.5, -1.0]), variable) for variable in variables])
        return [variable.numpy().tolist() for variable in variables]

    expected = trained(exclude_from_weight_decay=["bias", "gamma"])
    assert expected != trained()
    assert trained(excluded=True) == trained(npu_keras_optimizer, excluded=True) == expected


def test_sixteen_bit_variables_are_updated_in_float32():
    values = _trained_v1(lambda: tf1.Adam(2**-10), [1e-4] * 8, dtype=tf.float16)
    assert values[-1].dtype == np.float16 and np.all(np.isfinite(values)) and values[-1][0] < 1.0


@pytest.mark.parametrize("module", [keras, keras_legacy])
def test_sixteen_bit_variables_have_slots_of_float32_in_keras_too(module):
    """The square of this gradient is no float16 but zero, and so would be its moment."""
    variables = [tf.Variable([1.0, 2.0], dtype=dtype) for dtype in (tf.float16, tf.float32)]
    optimizer = module.Adam(0.125)
    for _ in range(3):
        optimizer.apply_gradients([(tf.fill([2], tf.cast(1e-4, one.dtype)), one) for one in variables])
    narrow, wide = (variable.numpy() for variable in variables)
    assert narrow.dtype == np.float16
    np.testing.assert_allclose(narrow, wide, atol=2e-3)
    own = optimizer.variables() if module is keras_legacy else optimizer.variables
    assert {slot.dtype.name for slot in own if slot.shape == [2]} == {"float32"}


def test_sparse_gradients_give_what_dense_ones_give():
    def trained(as_sparse, has_shape=True):
        with tf.Graph().as_default():
            table = tf.compat.v1.get_variable("t", [4, 2], initializer=tf.compat.v1.ones_initializer())
            rows = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), tf.constant([1, 1, 3]), [4, 2])
            gradient = rows if as_sparse else tf.convert_to_tensor(rows)
            gradient = gradient if has_shape else tf.IndexedSlices(rows.values, rows.indices)
            step = tf1.LAMB(0.1, use_global_norm=True).apply_gradients([(gradient, table)])
            with started_session() as session:
                session.run([step])
                session.run([step])
                return session.run(table)

    assert trained(True).tobytes() == trained(False).tobytes() == trained(True, has_shape=False).tobytes()


def test_large_sparse_gradients_that_become_dense_are_warned_of_once(caplog):
    caplog.set_level("INFO")
    for rows in (2**5, 2**25, 2**25):
        with tf.Graph().as_default():
            table = tf.compat.v1.get_variable("table", [rows, 3], use_resource=True)
            tf1.LAMB(0.1).minimize(tf.reduce_sum(tf.nn.embedding_lookup(table, [0, 1])))
    said = [(record.levelname, record.getMessage()) for record in caplog.records if "Sparse" in record.getMessage()]
    assert [level for level, _ in said].count("WARNING") == 1
    assert "[33554432, 3]" in next(text for level, text in said if level == "WARNING")


def test_global_norm_bounds_all_gradients_together():
    variables = [tf.Variable([0.0]), tf.Variable([0.0])]
    optimizer = keras.BertAdam(1.0, beta_1=0.0, beta_2=0.0, epsilon=1.0, weight_decay=0.0, max_grad_norm=0.5)
    optimizer.apply_gradients(zip([tf.constant([3.0]), tf.constant([4.0])], variables))
    np.testing.assert_allclose([v.numpy()[0] for v in variables], [-0.3 / 1.3, -0.4 / 1.4], rtol=1e-6)


@pytest.mark.parametrize("size", [1.0, 1e20, 8e37])
@pytest.mark.parametrize("face", ["keras", "keras_legacy", "tf1"])
def test_a_global_norm_above_float32_bounds_gradients_and_does_not_remove_them(face, size):
    arguments = {"beta_1": 0.0, "beta_2": 0.0, "epsilon": 1.0, "weight_decay": 0.0, "max_grad_norm": 0.5}
    with tf.Graph().as_default() if face == "tf1" else contextlib.nullcontext():
        variables = [tf.Variable([0.0]), tf.Variable([0.0])]
        gradients = [tf.constant([3.0 * size]), tf.constant([4.0 * size])]
        step = getattr(optimizers, face).BertAdam(1.0, **arguments).apply_gradients(zip(gradients, variables))
        if face == "tf1":
            with started_session() as session:
                session.run(step)
                values = session.run(variables)
        else:
            values = [variable.numpy() for variable in variables]
    np.testing.assert_allclose(np.ravel(values), [-0.3 / 1.3, -0.4 / 1.4], rtol=1e-6)


@pytest.mark.parametrize("module", [keras, keras_legacy])
def test_the_configuration_comes_back(module):
    made = module.LAMB(Halving(0.1, 5, 0.5), weight_decay=0.01, groups=[{"match": "bias", "lr": 0.05}])
    assert type(made).from_config(made.get_config()).get_config() == made.get_config()


@pytest.mark.parametrize("module", [keras, keras_legacy])
def test_a_configuration_has_the_rate_that_was_set(module):
    made, variable = module.LAMB(0.5), tf.Variable([1.0])
    for rate in (0.25, 0.125):  # before the first update and after it
        made.learning_rate = rate
        assert type(made).from_config(made.get_config()).rule.learning_rate == rate
        assert optimizer_numbers(made)["learning_rate"] == rate
        made.apply_gradients([(tf.constant([1.0]), variable)])


def test_keras_adds_no_decay_of_its_own():
    optimizer, variable = keras.SGD(0.5), tf.Variable([1.0])

    @tf.function
    def train():
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])

    optimizer.build([variable])
    operators = [op.type for op in train.get_concrete_function().graph.get_operations()]
    assert operators.count("AssignSubVariableOp") == 1


def test_a_configuration_that_cannot_be_written_ends_no_training():
    assert optimizer_numbers(keras.Adam(0.5, groups=[{"match": [tf.Variable([1.0])], "lr": 0.25}])) == {}


@pytest.mark.parametrize("module", [tf1, keras, keras_legacy])
def test_states_of_variables_with_one_name_are_kept_apart(module):
    variables, made = [tf.Variable([1.0]), tf.Variable([2.0])], [module.Adam(0.5), module.Adam(0.5)]
    for optimizer, gradients in zip(made, ([[1.0], [2.0]], [[3.0], [4.0]])):
        optimizer.apply_gradients(zip(map(tf.constant, gradients), variables))
    made[1].set_states(made[0].get_states())
    states = made[1].get_states()["m"]
    np.testing.assert_allclose([states["Variable"], states["Variable:1"]], [[0.1], [0.2]], rtol=1e-6)


@pytest.mark.parametrize("module", [tf1, keras, keras_legacy])
def test_ranks_cannot_share_an_update_that_needs_the_norm_of_all_gradients(module):
    for make in (lambda: module.LAMB(use_global_norm=True), lambda: module.BertAdam(0.1, max_grad_norm=1.0)):
        with pytest.raises(ValueError, match="is_weight_update_sharding.*all gradients at once"):
            NPUDistributedOptimizer(make(), is_weight_update_sharding=True)
    NPUDistributedOptimizer(module.LAMB(), is_weight_update_sharding=True)


def test_variables_of_zeros_move_by_the_whole_direction_of_lamb():
    variable = tf.Variable([0.0, 0.0])
    keras.LAMB(0.5, weight_decay=0.0).apply_gradients([(tf.constant([2.0, -3.0]), variable)])
    np.testing.assert_allclose(variable, [-0.5, 0.5], rtol=1e-5)
