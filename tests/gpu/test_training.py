"""Training on a GPU: the loss scale, skipped steps, stages, tail optimisation, Keras, and checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import optimizers
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients.collections import LOSS_SCALE, STEP_SKIPPED
from tests.goldens import cases, checks, keras3_models, keras_models
from tests.goldens.two_layers import OPTIMIZERS, assert_all_finite, assert_same_bits, train
from tests.session.models import session_config
from tests.session.precision.small_models import Dense, precision_of, session_of

tf1 = tf.compat.v1
pytestmark = pytest.mark.slow("for a GPU that most machines do not have")
GROWS_EVERY = 3


def dynamic(scale):
    return ExponentialUpdateLossScaleManager(scale, GROWS_EVERY, 1, 2, 0.5)


def test_overflows_of_float16_move_the_scale_and_reach_no_variable():
    """Kernels in float16 overflow at 65504; the scale is that of a model of its rule, fed with what was skipped."""
    model = Dense(lambda: NPUOptimizer(OPTIMIZERS["adam"](), dynamic(2.0**24), is_loss_scale=True))
    with session_of(model.graph, precision_of(precision_mode_v2="mixed_float16")) as session:
        scale, skipped = (model.graph.get_collection(name)[0] for name in (LOSS_SCALE, STEP_SKIPPED))
        session.run(model.init)
        seen, before = [], None
        for number in range(60):
            values = dict(zip(map(str, range(99)), session.run(model.variables)))
            assert_all_finite(values)
            _, used, is_skipped = session.run([model.train_op, scale, skipped], model.batch(number))
            if before is not None and seen[-1][1]:
                changed = [k for k in values if not np.array_equal(values[k], before[k])]
                assert len(changed) <= 2, "more than the scale and its counter has changed in a skipped step"
            seen.append((float(used), bool(is_skipped)))
            before = values
    expected, good = 2.0**24, 0
    for used, is_skipped in seen:
        assert used == expected
        good = 0 if is_skipped else good + 1
        expected = expected / 2 if is_skipped else expected * 2 if good == GROWS_EVERY else expected
        good = 0 if good == GROWS_EVERY else good
    assert 3 < sum(is_skipped for _, is_skipped in seen) < 50


@pytest.mark.parametrize("way, name", [*cases.plan(1, False), *cases.plan(1, True)])
def test_training_is_that_of_the_model_in_numpy(way, name):
    checks.assert_equals_numpy([checks.trained([(way, name)])])


@keras3_models.beside_keras3
@pytest.mark.parametrize("name", keras3_models.OPTIMIZERS)
def test_keras_3_skips_and_goes_on(name):
    data = keras_models.make_data(12, poisoned=[4])
    model, _ = keras3_models.fit(keras3_models.dynamic(keras3_models.OPTIMIZERS[name]()), data)
    assert all(np.isfinite(value).all() for value in model.get_weights())
    assert int(model.optimizer.iterations) in (5, 11)  # "adamw" accumulates two batches


def test_an_update_that_xla_compiles_is_that_of_operators():
    def trained_with(jit_compile):
        variable = tf.Variable([1.0, 2.0, 3.0])
        optimizer = npu_keras_optimizer(tf.keras.optimizers.Adam(0.05, jit_compile=False), dynamic(2.0**10))
        optimizer.build([variable])

        @tf.function(jit_compile=jit_compile)
        def step(factor):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(variable) * factor)
                scaled = optimizer.get_scaled_loss(loss)
            gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, [variable]))
            optimizer.apply_gradients(zip(gradients, [variable]))

        for number in range(8):
            step(tf.constant(np.inf if number == 3 else 1.0 + number))
        return variable.numpy()

    compiled, plain = trained_with(True), trained_with(False)
    assert np.isfinite(plain).all()
    np.testing.assert_allclose(compiled, plain, rtol=1e-6)


def test_deterministic_training_repeats_its_bits():
    def once():
        with tf.Graph().as_default():
            images = tf.random.normal([8, 16, 16, 3])
            kernel = tf1.get_variable("kernel", [3, 3, 3, 8])
            logits = tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(images, kernel, 1, "SAME")), [1, 2])
            loss = tf.reduce_mean(tf.square(tf.gather(logits, tf.random.uniform([64], 0, 8, tf.int32)) - 1.0))
            step = NPUOptimizer(OPTIMIZERS["adam"](), dynamic(2.0**10), is_loss_scale=True).minimize(loss)
            with tf1.Session(config=session_config(deterministic=1)) as session:
                session.run(tf1.global_variables_initializer())
                for _ in range(20):
                    session.run(step)
                return {variable.name: session.run(variable) for variable in tf1.global_variables()}

    assert_same_bits(once(), once())


@pytest.mark.parametrize("first, then", [("CPU", None), (None, "CPU")], ids=["from the CPU", "to the CPU"])
def test_a_checkpoint_goes_on_elsewhere(first, then, tmp_path):
    """`None` is where TensorFlow puts operators by itself: the GPU, if there is one."""

    def run(device, steps, start, path):
        with tf.Graph().as_default(), tf.device(device and f"/{device}:0"):
            model = Dense(lambda: NPUOptimizer(OPTIMIZERS["adam"](), dynamic(2.0**10), is_loss_scale=True))
        with model.graph.as_default(), tf1.Session(config=tf1.ConfigProto(allow_soft_placement=True)) as session:
            saver = tf1.train.Saver()
            session.run(model.init)
            if start:
                saver.restore(session, str(path))
            for number in steps:
                session.run(model.train_op, model.batch(number))
            saver.save(session, str(path))
            return {variable.name: session.run(variable) for variable in model.variables}

    run(first, range(5), False, tmp_path / "model")
    moved = run(then, range(5, 10), True, tmp_path / "model")
    stayed = run("CPU", range(10), False, tmp_path / "other")
    assert set(moved) == set(stayed)
    for name, value in stayed.items():
        np.testing.assert_allclose(moved[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("rule", ["LAMB", "AdamW"])
def test_a_fused_update_is_that_of_single_variables_in_fewer_kernels(rule):
    def once(fused):
        with tf.Graph().as_default():
            variables = [tf1.get_variable(f"v{number}", [16], use_resource=True) for number in range(40)]
            loss = tf.add_n([tf.reduce_sum(tf.square(variable - 1.0)) for variable in variables])
            step = getattr(optimizers, rule)(0.01, fused=fused).minimize(loss)
            options, metadata = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE), tf1.RunMetadata()
            with tf1.Session() as session:
                for variable in variables:
                    session.run(variable.initializer, {variable.initializer.inputs[1]: np.linspace(0, 1, 16)})
                session.run(tf1.variables_initializer([v for v in tf1.global_variables() if v not in variables]))
                session.run(step)
                session.run(step, options=options, run_metadata=metadata)
                values = {variable.name: session.run(variable) for variable in variables}
        kernels = sum(len(device.node_stats) for device in metadata.step_stats.dev_stats)
        return values, kernels

    (fused, few), (single, many) = once(True), once(False)
    for name, value in single.items():
        np.testing.assert_allclose(fused[name], value, rtol=1e-5, err_msg=name)
    assert few < many / 2


@pytest.mark.parametrize("rule", ["LAMB", "AdamW"])
def test_a_fused_update_of_large_variables_writes_one_temporary(rule):
    """Returns the memory that operators allocate, in units of the variables' bytes: variables are updated in place."""
    with tf.Graph().as_default():
        variables = [tf1.get_variable(f"v{number}", [512, 512], use_resource=True) for number in range(4)]
        gradients = [tf.Variable(tf.ones([512, 512]), trainable=False) for _ in variables]
        pairs = [(gradient.read_value(), variable) for gradient, variable in zip(gradients, variables)]
        step = getattr(optimizers, rule)(0.01, fused=True).apply_gradients(pairs)
        options, metadata = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE), tf1.RunMetadata()
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(step)
            session.run(step, options=options, run_metadata=metadata)
    allocated = sum(
        max(record.alloc_bytes, 0)
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
        for memory in node.memory
        for record in memory.allocation_records
    )
    assert 0 < allocated <= 1.05 * 4 * 512 * 512 * 4


def test_memory_of_the_gpu_grows_with_what_is_used(real_gpu):
    train(lambda: NPUOptimizer(OPTIMIZERS["adam"](), dynamic(2.0**10), is_loss_scale=True), 3)
    assert tf.config.experimental.get_memory_info("GPU:0")["peak"] < 2**28
