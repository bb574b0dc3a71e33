"""Rules as optimizers of Keras 3: the bits of `optimizers.keras`, in `fit`, in files, and inside a pipeline."""

from __future__ import annotations

import importlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base.tf_internals import keras3
from npu_bridge.optimizers import keras as rules_of_keras2
from npu_bridge.optimizers import rules
from npu_bridge.stages import FreezeSchedule
from tests.goldens.keras3_models import beside_keras3, dynamic, fit, make_model, state_of
from tests.goldens.keras_models import make_data
from tests.goldens.two_layers import assert_same_bits

pytestmark = beside_keras3
RULES = [rule.__name__ for rule in rules.ALL]
GIVEN = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True, "exclude_from_weight_decay": ["second"], "weight_decay": 0.01},
    "LAMB": {"weight_decay": 0.01, "use_global_norm": True},
    "AdamP": {"clipnorm": 0.5},
    "RMSProp": {"momentum": 0.9},
}


def made(name, **given):
    return getattr(importlib.import_module("npu_bridge.optimizers.keras3"), name)(**given)


def gradients(step):
    """Returns gradients of a matrix, a vector, and rows of a table, one of them twice."""
    random = np.random.RandomState(step)
    rows = tf.IndexedSlices(random.randn(3, 2).astype("f"), tf.constant([4, 1, 4]), tf.constant([5, 2]))
    return [random.randn(3, 2).astype("f"), random.randn(4).astype("f"), rows]


def starts():
    random = np.random.RandomState(7)
    names, shapes = ("first", "second", "table"), ([3, 2], [4], [5, 2])
    return {name: random.randn(*shape).astype("f") for name, shape in zip(names, shapes)}


def trained(optimizer, make_variable, steps=4):
    variables = [make_variable(start, name) for name, start in starts().items()]
    update = tf.function(lambda *given: [optimizer.apply_gradients(zip(given, variables)), None][1])
    for step in range(steps):
        update(*gradients(step))
    return {str(number): variable.numpy() for number, variable in enumerate(variables)}


def of_keras3(start, name):
    return keras.Variable(start, name=name)


def of_tensorflow(start, name):
    return tf.Variable(start, name=name)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_gives_the_bits_it_gives_in_keras_2(name, fused):
    """With weight decay, clipping and sparse gradients; on variables of Keras and of TensorFlow."""
    given = {**GIVEN.get(name, {}), "fused": fused, "learning_rate": 0.01}
    expected = trained(getattr(rules_of_keras2, name)(**given), of_tensorflow)
    assert_same_bits(trained(made(name, **given), of_keras3), expected)
    assert_same_bits(trained(made(name, **given), of_tensorflow), expected)
    assert any(np.any(value != start) for value, start in zip(expected.values(), starts().values()))


def test_groups_are_found_by_path_and_by_variable():
    first, second = keras.Variable([1.0], name="first"), keras.Variable([1.0], name="second")
    with keras.name_scope("encoder"):
        third = keras.Variable([1.0], name="kernel")
    groups = [{"match": "encoder/kernel", "lr": 0.5}, {"match": [second], "lr": 0.25, "rule": "SGD"}]
    optimizer = made("AdamW", learning_rate=0.0, weight_decay=0.0, groups=groups)
    optimizer.apply([tf.constant([1.0])] * 3, [first, second, third])
    np.testing.assert_allclose([first[0], second[0], third[0]], [1.0, 0.75, 0.5], rtol=1e-4)
    assert all(each is not second for each in optimizer.variables)
    with pytest.raises(ValueError, match="group 0 matches no variable"):
        made("SGD", learning_rate=0.1, groups=[{"match": "decoder", "lr": 0.5}]).build([first])


class TwoLayers(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = keras.layers.Dense(1, use_bias=False), keras.layers.LayerNormalization(center=False)

    def call(self, inputs):
        return self.norm(self.dense(inputs))


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, dynamic])
def test_layers_of_a_subclassed_model_are_found_by_name(wrap):
    model = TwoLayers()
    model(tf.ones([2, 1]))
    model.set_weights([np.ones([1, 1]), np.ones([1])])
    optimizer = wrap(made("AdamW", learning_rate=0.5, weight_decay=0.5, exclude_from_weight_decay=["norm"]))
    optimizer.apply([tf.zeros([1, 1]), tf.zeros([1])], model.trainable_variables)
    assert [each.tolist() for each in model.get_weights()] == [[[0.75]], [1.0]]
    names = [keras3.name_of(variable.value) for variable in model.trainable_variables]
    assert FreezeSchedule(groups=[["dense"], ["norm"]]).last_group_of_each(names) == [0, 1]


def test_variables_can_be_excluded_from_weight_decay_by_the_method_of_keras():
    optimizer, variables = made("AdamW", learning_rate=0.5, weight_decay=0.5), []
    variables += [keras.Variable([1.0], name=name) for name in ("kernel", "bias", "gamma")]
    optimizer.exclude_from_weight_decay([variables[2]], ["bias"])
    optimizer.apply([tf.constant([0.0])] * 3, variables)
    assert [float(variable[0]) for variable in variables] == [0.75, 1.0, 1.0]


def schedule():
    return keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.5, 0.25, 0.125])


RATES = {
    "schedule of Keras 3": schedule,
    "schedule of Keras 2": lambda: tf.keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.5, 0.25, 0.125]),
    "function of the step": lambda: lambda step: tf.gather([0.5, 0.25, 0.125, 0.125], step),
}


@pytest.mark.parametrize("kind", RATES)
def test_rates_are_read_at_the_number_of_updates(kind):
    optimizer, variable, values = made("SGD", learning_rate=RATES[kind]()), keras.Variable([1.0]), []
    for _ in range(3):
        optimizer.apply([tf.constant([1.0])], [variable])
        values.append(float(variable[0]))
    assert values == [0.5, 0.25, 0.125] and float(optimizer.learning_rate) == 0.125


def test_a_rate_can_be_set():
    optimizer, variable = made("Adadelta", learning_rate=0.5), keras.Variable([1.0])
    optimizer.learning_rate = 0.0
    optimizer.apply([tf.constant([1.0])], [variable])
    assert float(variable[0]) == 1.0
    assert type(optimizer).from_config(optimizer.get_config()).rule.learning_rate == 0.0


@pytest.mark.parametrize("name", ["LAMB", "SGD"])
def test_the_configuration_is_json_and_comes_back(name):
    optimizer = made(name, learning_rate=schedule(), groups=[{"match": "bias", "lr": schedule()}], fused=True)
    config = json.loads(json.dumps(optimizer.get_config()))
    again = type(optimizer).from_config(config)
    assert json.loads(json.dumps(again.get_config())) == config
    assert keras.optimizers.schedules.serialize(again.rule.learning_rate) == config["learning_rate"]


def lamb():
    return made("LAMB", learning_rate=0.01, weight_decay=0.01, fused=True)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, dynamic], ids=["bare", "wrapped"])
@pytest.mark.parametrize("way", ["keras", "checkpoint"])
def test_a_loaded_model_goes_on_where_the_saved_one_stopped(way, wrap, tmp_path):
    model, _ = fit(wrap(lamb()), make_data(3))
    if way == "keras":
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
    else:
        loaded = make_model()
        loaded.compile(wrap(lamb()), "mse")
        loaded.optimizer.build(loaded.trainable_variables)
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "checkpoint"))
        tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer).restore(path).assert_existing_objects_matched()
    for each in (model, loaded):
        each.fit(*make_data(3), batch_size=8, shuffle=False, verbose=0)
    assert_same_bits(state_of(loaded), state_of(model))
    assert int(loaded.optimizer.iterations) == 6


def test_states_move_between_the_generations():
    """`get_states` of one goes into `set_states` of another, before its slots exist, too."""
    variable, other = tf.Variable([1.0, 2.0], name="v"), tf.Variable([1.0, 2.0], name="v")
    first, second = rules_of_keras2.LAMB(0.1), made("LAMB", learning_rate=0.1)
    first.apply_gradients([(tf.constant([1.0, 3.0]), variable)])
    second.set_states(first.get_states())
    other.assign(variable)
    for optimizer, each in ((first, variable), (second, other)):
        optimizer.apply_gradients([(tf.constant([2.0, 1.0]), each)])
    assert other.numpy().tolist() == variable.numpy().tolist()
    assert json.dumps({**second.get_states(), "m": 0, "v": 0}) == json.dumps({**first.get_states(), "m": 0, "v": 0})


def test_a_misspelt_argument_is_told():
    with pytest.raises(TypeError, match="unknown argument 'beta1'.*Did you mean 'beta_1'"):
        made("LAMB", beta1=0.5)
    with pytest.raises(ValueError, match="LAMB: beta_1 is out of range"):
        made("LAMB", beta_1=2.0)
