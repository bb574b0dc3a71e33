"""Variables of 16 bits are updated in float32, and reference variables by Keras optimizers, through stand-ins."""

import functools
import inspect

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import amp
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.optimizers import keras as our_keras
from npu_bridge.optimizers import tf1 as ours
from npu_bridge.stages import Accumulate, ClipByGlobalNorm

tf1 = tf.compat.v1
WIDE, HALF, BRAIN = "float32", "float16", "bfloat16"
FEATURES = np.random.RandomState(0).randn(64, 6).astype(np.float32)
LABELS = (FEATURES @ np.random.RandomState(1).randn(6, 3)).astype(np.float32)
START = np.random.RandomState(2).randn(6, 3).astype(np.float32) / 2


def test_stand_ins_of_variables_with_one_name_are_all_saved(tmp_path):
    path = str(tmp_path / "saved")
    for is_resumed in (False, True):
        variables = [tf.Variable([1.0], dtype=BRAIN, name="kernel") for _ in range(2)]
        optimizer = npu_keras_optimizer(our_keras.SGD(1.0))
        saved = tf.train.Checkpoint(optimizer=optimizer, variables=variables)
        if is_resumed:
            saved.restore(path)
        # Bfloat16 rounds one such step away from 1, and two to the next smaller number.
        optimizer.apply_gradients([(tf.constant([0.4 / 256], BRAIN), each) for each in variables])
        saved.write(path)
        assert [float(each[0]) for each in variables] == [1 - is_resumed / 256] * 2


def stock_optimizers():
    """Makers of the optimizers that come with TensorFlow and Keras, by name."""
    made = {
        "GradientDescent": lambda: tf1.train.GradientDescentOptimizer(0.01),
        "Momentum": lambda: tf1.train.MomentumOptimizer(0.005, 0.9, use_nesterov=True),
        "Adam": lambda: tf1.train.AdamOptimizer(0.003),
        "Adagrad": lambda: tf1.train.AdagradOptimizer(0.03),
        "AdagradDA": lambda: tf1.train.AdagradDAOptimizer(0.03, tf1.train.get_or_create_global_step()),
        "Adadelta": lambda: tf1.train.AdadeltaOptimizer(1.0),
        "Ftrl": lambda: tf1.train.FtrlOptimizer(0.03),
        "RMSProp": lambda: tf1.train.RMSPropOptimizer(0.003, momentum=0.5, centered=True),
        "ProximalAdagrad": lambda: tf1.train.ProximalAdagradOptimizer(0.03),
        "ProximalGradientDescent": lambda: tf1.train.ProximalGradientDescentOptimizer(0.01),
    }
    for name in ("Adam", "Adamax", "Nadam", "Adadelta", "Adagrad", "Ftrl", "RMSprop", "SGD"):
        rate = 1.0 if name.startswith("Ada") and name.endswith(("delta", "grad")) else 0.003
        made[f"legacy {name}"] = functools.partial(getattr(tf.keras.optimizers.legacy, name), rate)
        if name != "Nadam":  # Keras' own does not train in a TF 1 graph
            made[f"keras {name}"] = functools.partial(getattr(tf.keras.optimizers, name), rate)
    made["keras AdamW"] = lambda: tf.keras.optimizers.AdamW(0.003, weight_decay=0.01)
    made["keras Adafactor"] = lambda: tf.keras.optimizers.Adafactor(0.01)
    made["keras Lion"] = lambda: tf.keras.optimizers.Lion(0.001)
    schedule = tf.keras.optimizers.schedules.PolynomialDecay(0.01, 300)
    made["keras Adam with averages"] = lambda: tf.keras.optimizers.Adam(
        schedule, use_ema=True, ema_momentum=0.999, ema_overwrite_frequency=50
    )
    return made


def our_optimizers():
    """Makers of ours, by name; each once alone, and Adam and LAMB also in one step for all variables."""
    rates = {"Adadelta": 1.0, "LARS": 10.0}
    rules = {name: made for name, made in vars(ours).items() if inspect.isclass(made) and name != "Tf1Optimizer"}
    made = {f"our {name}": functools.partial(rule, rates.get(name, 0.003)) for name, rule in rules.items()}
    fused = {f"our fused {name}": functools.partial(rules[name], 0.003, fused=True) for name in ("Adam", "LAMB")}
    return {**made, **fused}


def loss_of(weights):
    return tf.reduce_mean(tf.square(tf.matmul(FEATURES, tf.cast(weights, tf.float32)) - LABELS))


def weights_in(scope, dtype=WIDE, use_resource=True):
    with tf1.variable_scope(scope.replace(" ", "_")):
        return tf1.get_variable(dtype, initializer=tf.cast(START, dtype), use_resource=use_resource)


def distances(values):
    """Yields the distance of 16-bit values from float32 ones, beyond their own rounding, as a share of the way."""
    wide = values[WIDE]
    for dtype, ulp in ((HALF, 2.0**-11), (BRAIN, 2.0**-8)):
        away = np.maximum(np.abs(values[dtype] - wide) - ulp * np.abs(wide), 0)
        yield float(np.max(away) / np.max(np.abs(wide - START)))


@pytest.mark.few_fast(1, "every optimizer trains twice")
@pytest.mark.parametrize("optimizers", [stock_optimizers, our_optimizers])
def test_variables_of_16_bits_train_as_those_of_32(optimizers):
    with tf.Graph().as_default():
        trained, steps = {}, []
        for number, (name, make) in enumerate(optimizers().items()):
            own = {dtype: weights_in(name, dtype, bool(number % 2)) for dtype in (WIDE, HALF, BRAIN)}
            loss = tf.add_n([loss_of(variable) for variable in own.values()])
            steps.append(NPUOptimizer(make()).minimize(loss, var_list=list(own.values())))
            trained[name] = {dtype: tf.cast(variable, tf.float32) for dtype, variable in own.items()}
        step = tf.group(*steps)
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for _ in range(150):
                session.run(step)
            trained = session.run(trained)
    far = {name: found for name, values in trained.items() if max(found := [*distances(values)]) > 0.02}
    assert not far and len(trained) >= 12
    assert all(np.max(np.abs(values[WIDE] - START)) > 0.005 for values in trained.values())


@pytest.mark.few_fast(1, "the other takes the same way")
@pytest.mark.parametrize("scales", [False, True])
def test_keras_optimizers_train_reference_variables_to_the_same_bits(scales, tmp_path):
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.5)
    makers = {
        "RMSprop": lambda: tf.keras.optimizers.RMSprop(0.01),
        "Adagrad": lambda: tf.keras.optimizers.Adagrad(0.01),
        "Adam": lambda: tf.keras.optimizers.Adam(schedule, use_ema=True),
        "legacy": lambda: tf.keras.optimizers.legacy.Adam(0.01),
    }
    # Grappler rewrites the two graphs in different ways, and some processors round a rewritten square root differently.
    settings = tf1.ConfigProto()
    settings.graph_options.rewrite_options.disable_meta_optimizer = True
    results = []
    for use_resource in (True, False):
        with tf.Graph().as_default():
            tf1.set_random_seed(3)
            step_counter = tf1.train.get_or_create_global_step()
            losses, steps = [], []
            for name, make in makers.items():
                with tf1.variable_scope(name, use_resource=use_resource, constraint=tf.keras.constraints.NonNeg()):
                    kernel = tf1.get_variable("kernel", initializer=START)
                    table = tf1.get_variable("table", [9, 6], initializer=tf1.ones_initializer())
                rows = tf.nn.embedding_lookup(table, [1, 4, 4]) if name != "legacy" else table
                losses.append(tf.reduce_mean(tf.square(tf.matmul(rows, kernel) - 1.0)) + loss_of(kernel))
                manager = FixedLossScaleManager(128.0) if scales else None
                optimizer = NPUOptimizer(make(), manager, is_loss_scale=scales)
                steps.append(optimizer.minimize(losses[-1], step_counter, var_list=[kernel, table]))
                assert hasattr(kernel, "handle") == use_resource
            saver = tf1.train.Saver()
            with tf1.Session(config=settings) as session:
                session.run(tf1.global_variables_initializer())
                values = [session.run([*losses, *steps])[: len(losses)] for _ in range(12)]
                saver.save(session, str(tmp_path / f"{use_resource}"))
        results.append((values, tf.train.load_checkpoint(str(tmp_path / f"{use_resource}"))))
    (of_resources, saved), (of_references, saved_too) = results
    assert of_resources == of_references and of_resources[0] > of_resources[-1]
    assert saved.get_variable_to_shape_map() == saved_too.get_variable_to_shape_map()
    assert "Adam_1/m/Adam/kernel" in saved.get_variable_to_shape_map()
    for name in saved.get_variable_to_shape_map():
        assert saved.get_tensor(name).tobytes() == saved_too.get_tensor(name).tobytes(), name


def test_a_stand_in_is_saved_and_begins_anew_where_it_does_not_fit(tmp_path):
    def training():
        weights = weights_in("w", BRAIN)
        optimizer = NPUOptimizer(tf1.train.AdamOptimizer(0.001))
        step = optimizer.minimize(loss_of(weights), var_list=[weights])
        assert optimizer.get_slot_names() == ["float32", "m", "v"]
        assert optimizer.get_slot(weights, "m").dtype.base_dtype == tf.float32
        return weights, optimizer.get_slot(weights, "float32"), step

    def run(session, step, count):
        for _ in range(count):
            session.run(step)

    path = str(tmp_path / "model")
    with tf.Graph().as_default(), tf1.Session() as session:
        weights, stand_in, step = training()
        session.run(tf1.global_variables_initializer())
        run(session, step, 5)
        tf1.train.Saver().save(session, path)
        run(session, step, 5)
        expected = session.run([weights, stand_in])
        session.run(weights.assign(tf.fill([6, 3], tf.constant(2.0, BRAIN))))
        run(session, step, 1)
        assert np.all(np.abs(session.run(stand_in) - 2.0) < 0.01)
    assert {name for name, _ in tf.train.list_variables(path)} >= {
        f"w/{BRAIN}",
        f"w/{BRAIN}/float32",
        f"w/{BRAIN}/Adam",
    }
    with tf.Graph().as_default(), tf1.Session() as session:
        weights, stand_in, step = training()
        saver = tf1.train.Saver()
        saver.restore(session, path)
        run(session, step, 5)
        assert [value.tobytes() for value in session.run([weights, stand_in])] == [v.tobytes() for v in expected]
        others = [variable for variable in tf1.global_variables() if variable is not stand_in]
        tf1.train.Saver(others).save(session, f"{path}_older")
        saver.restore(session, f"{path}_older")
        before = session.run(tf.cast(weights, tf.float32))
        run(session, step, 1)
        assert np.all(np.abs(session.run(stand_in) - before) < 0.002)  # Adam's steps are of 0.001


@pytest.mark.slow("a saved model for each optimizer")
@pytest.mark.parametrize("family", [tf.keras.optimizers, tf.keras.optimizers.legacy, our_keras])
def test_keras_goes_on_with_what_stands_for_16_bits(family, tmp_path):
    def training(dtype=HALF):
        tf.keras.backend.clear_session()
        layer = tf.keras.layers.Dense(3, dtype=dtype, kernel_initializer=tf.keras.initializers.Constant(0.5))
        model = tf.keras.Sequential([tf.keras.Input([6]), layer])
        model.compile(npu_keras_optimizer(family.Adam(0.001)), "mse")
        return model

    def fit(model, epochs):
        losses = model.fit(FEATURES, LABELS, batch_size=32, epochs=epochs, shuffle=False, verbose=0).history["loss"]
        return losses, [tf.cast(weight, tf.float32).numpy().tobytes() for weight in model.trainable_variables]

    model = training()
    early = fit(model, 3)[0]
    ending = "h5" if family is tf.keras.optimizers.legacy else "keras"  # which holds no state of legacy optimizers
    model.save(str(tmp_path / f"model.{ending}"))
    model.save_weights(str(tmp_path / "weights"))
    late, expected = fit(model, 3)
    assert late[-1] < early[0]
    in_float32 = fit(training(WIDE), 6)[0]
    assert abs(late[-1] / in_float32[-1] - 1) < 0.01

    model = training()
    model.load_weights(str(tmp_path / "weights"))  # before the optimizer has slots
    assert fit(model, 3) == (late, expected)
    model = tf.keras.models.load_model(str(tmp_path / f"model.{ending}"))
    assert fit(model, 3) == (late, expected)


def test_optimizers_that_cannot_be_given_stand_ins_are_refused_by_name():
    inside = tf1.train.GradientDescentOptimizer(0.1)
    with pytest.raises(
        ValueError, match="O3: SyncReplicasOptimizer updates variables in a separate thread.*master_weights=True"
    ):
        amp.configure("O3", tf1.train.SyncReplicasOptimizer(inside, 1))
    amp.configure("O3", inside)
    with tf.Graph().as_default():
        weights = weights_in("w", HALF)
        weights_of_no_shape = tf1.Variable(tf.cast(START, HALF), shape=tf.TensorShape(None), use_resource=True)
        for variable in (weights, weights_of_no_shape):
            optimizer = NPUOptimizer(inside)
            if variable is weights:
                optimizer.minimize(loss_of(variable), var_list=[variable])
                continue
            with pytest.raises(ValueError, match="16-bit variable .* cannot be updated in float32"):
                optimizer.apply_gradients([(tf.cast(START, HALF), variable)])


def nested(optimizer, manager, **settings):
    return NPULossScaleOptimizer(NPUDistributedOptimizer(optimizer), manager, **settings)


def scaled_optimizer(way, **settings):
    """Returns an optimizer with a learning rate of 1e7 that scales the loss by 2**16."""
    bare = tf.keras.optimizers.legacy.SGD if way is npu_keras_optimizer else tf1.train.GradientDescentOptimizer
    switches = {} if way is nested else {"is_loss_scale": True}
    return way(bare(1e7), FixedLossScaleManager(2.0**16), **switches, **settings)


WAYS = {
    "alone": (NPUOptimizer, {}),
    "clipped": (NPUOptimizer, {"stages": [ClipByGlobalNorm(1.0)]}),
    "combined": (NPUOptimizer, {"combine_grad": True, "check_combined_tensors": True}),
    "window": (NPUOptimizer, {"stages": [Accumulate(1)]}),
    "nested": (nested, {}),
    "Keras": (npu_keras_optimizer, {}),
    "Keras, clipped": (npu_keras_optimizer, {"stages": [ClipByGlobalNorm(1.0)]}),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_only_fit_float16_with_their_scale_reach_the_float32_copy(way):
    variables = [tf.Variable([1.0], dtype=tf.float16) for _ in range(2)]
    optimizer = scaled_optimizer(WAYS[way][0], **WAYS[way][1])
    # The gradient, 1e-8, is 0 in float16.
    optimizer.minimize(lambda: tf.reduce_sum(tf.cast(variables, tf.float32)) * 1e-8, var_list=variables)
    np.testing.assert_allclose(variables, 0.9, atol=1e-3)
