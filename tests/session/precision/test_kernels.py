"""Which kernels really run: the graphs that were executed, counted by dtype."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from npu_bridge.estimator.npu.npu_scope import keep_dtype_scope
from npu_bridge.session.precision import list_builds
from npu_bridge.session.precision.rewriter import IMITATION
from tests.session.precision.small_models import (
    Dense,
    classic_loops,
    dtypes_by_name,
    dtypes_of,
    kernels_of,
    nodes_of_step,
    precision_of,
    run_with_graph,
    session_of,
    started,
    tf1,
)

# One of each policy; test_modes.py has the names of each.
FLOAT16_MODES = [{"precision_mode": "allow_mix_precision"}, {"precision_mode_v2": "fp16"}]
FLOAT32_MODES = [{}, {"precision_mode_v2": "origin"}, {"precision_mode_v2": "mixed_float16", "use_off_line": False}]


def names_in(nodes, dtype):
    return {name for name, computed in dtypes_by_name(nodes, "MatMul").items() if computed == dtype}


@pytest.mark.parametrize("keys", FLOAT16_MODES, ids=str)
def test_matrix_products_in_float16(keys):
    nodes = nodes_of_step(precision_of(**keys))
    assert dtypes_of(nodes) == {"float16": 5}
    assert dtypes_of(nodes, "ResourceApply") == {"float32": 3}


def test_matrix_products_of_float16_values(monkeypatch):
    """A CPU's float16 kernels add up in float16; float16 in and float32 sums are float32 kernels on rounded values."""
    monkeypatch.delenv(IMITATION)
    nodes = nodes_of_step(precision_of(precision_mode_v2="cube_fp16in_fp32out"))
    assert kernels_of(nodes) == {"float32": 5}
    assert dtypes_of(nodes) == {"float16": 5}
    assert dtypes_of(nodes, "ResourceApply") == {"float32": 3}


def test_a_product_of_the_cube_mode_is_rounded_once(monkeypatch):
    random = np.random.RandomState(0)
    left, right = random.randn(16, 300).astype("f"), random.randn(300, 8).astype("f")
    with tf.Graph().as_default() as graph:
        inputs = [tf1.placeholder(tf.float32, value.shape) for value in (left, right)]
        result = tf.identity(tf.matmul(*inputs))

    def product(precision, *values):
        with session_of(graph, precision) as session:
            return session.run(result, dict(zip(inputs, values)))

    rounded = product(None, *(value.astype(np.float16).astype("f") for value in (left, right)))
    half = product(precision_of(precision_mode_v2="mixed_float16"), left, right)
    monkeypatch.delenv(IMITATION)
    cube = product(precision_of(precision_mode_v2="cube_fp16in_fp32out"), left, right)
    np.testing.assert_array_equal(cube, rounded.astype(np.float16).astype("f"))
    exact = left.astype(np.float64) @ right.astype(np.float64)
    if tf.__version__.startswith("2.15."):  # later kernels for float16 add up in float32 as well
        assert np.abs(half - exact).max() > 5 * np.abs(cube - exact).max()


def test_matrix_products_in_bfloat16(bfloat16):
    nodes = nodes_of_step(precision_of(precision_mode_v2="mixed_bfloat16"))
    assert dtypes_of(nodes) == {"bfloat16": 5}
    assert dtypes_of(nodes, "ResourceApply") == {"float32": 3}


@pytest.mark.parametrize("keys", [FLOAT16_MODES[0], {"precision_mode": "allow_mix_precision_bf16"}], ids=str)
def test_where_a_script_lists_the_passes_its_precision_is_among_them(keys, bfloat16):
    """Guides tell scripts of several ranks to write this list, with a name in it that TensorFlow does not have."""
    config = tf1.ConfigProto()
    passes = ["pruning", "function", "constfold", "shape", "arithmetic", "loop", "dependency", "layout", "memory"]
    config.graph_options.rewrite_options.optimizers.extend([*passes, "GradFusionOptimizer"])
    nodes = nodes_of_step(precision_of(**keys), config=config)
    assert dtypes_of(nodes) == {"bfloat16" if "bf16" in keys["precision_mode"] else "float16": 5}


def test_it_is_said_that_steps_that_are_looked_into_keep_their_dtype(caplog, tmp_path):
    keys = {"enable_dump_debug": True, "dump_path": str(tmp_path)}
    precision_of(**keys).prepare(tf1.ConfigProto())
    precision_of(**FLOAT16_MODES[0]).prepare(tf1.ConfigProto())
    assert "enable_dump" not in caplog.text
    precision_of(**FLOAT16_MODES[0], **keys).prepare(tf1.ConfigProto())
    assert "enable_dump_debug: examined operators keep their dtype" in caplog.text


@pytest.mark.parametrize("keys", FLOAT32_MODES, ids=str)
def test_the_graph_as_it_is(keys):
    nodes, stock = nodes_of_step(precision_of(**keys)), nodes_of_step(None)
    assert dtypes_of(nodes) == {"float32": 5}
    assert sorted((node.op, node.name) for node in nodes) == sorted((node.op, node.name) for node in stock)


def test_reach_of_the_float16_modes():
    """All operators take part in fp16; test_isolation.py has Relu, which stays out of the cube mode alone."""
    mixed, everything = (nodes_of_step(precision_of(precision_mode_v2=mode)) for mode in ("mixed_float16", "fp16"))
    assert dtypes_of(mixed, "Square") == {"float32": 1}
    assert dtypes_of(everything, "Square") == {"float16": 1}


def test_reference_variables_keep_their_dtype():
    nodes = nodes_of_step(precision_of(precision_mode_v2="mixed_float16"), Dense(use_resource=False))
    assert dtypes_of(nodes) == {"float16": 5}
    assert dtypes_of(nodes, "ApplyAdam") == {"float32": 3}


def test_every_way_to_run_is_in_the_precision():
    model = Dense()
    with started(model, precision_of(precision_mode_v2="mixed_float16")) as session:
        feed = model.batch(0)
        with model.graph.as_default():
            logits = tf.identity(model.logits)
            constant = tf.matmul(tf.ones([2, 8]) * 1.0001, model.hidden)
            result = tf.identity(constant)
        with started(model) as stock:
            exact = stock.run(logits, feed)
            exact_result = stock.run(result)
        reduced = session.run(logits, feed)
        assert 0 < np.max(np.abs(reduced - exact)) < 0.05
        np.testing.assert_array_equal(session.make_callable(logits, [model.x])(feed[model.x]), reduced)
        np.testing.assert_array_equal(session.make_callable(result)(), session.run(result))
        assert np.any(session.run(result) != exact_result)
        handle = session.partial_run_setup([logits], [model.x])
        np.testing.assert_array_equal(session.partial_run(handle, logits, feed), reduced)


def test_one_executor_for_each_set_of_fetches():
    model = Dense()
    with started(model, precision_of(precision_mode_v2="mixed_float16")) as session:
        for number in range(3):
            session.run([model.train_op, model.loss], model.batch(number))
            session.run(model.loss, model.batch(number))
        assert [build.is_training for build in list_builds(session)] == [False, True, False]


def test_an_error_of_the_run_is_the_callers():
    model = Dense()
    with started(model, precision_of(precision_mode_v2="mixed_float16")) as session:
        with pytest.raises(tf.errors.InvalidArgumentError, match="must feed a value"):
            session.run(model.loss)
        with pytest.raises(ValueError, match="Cannot feed"):
            session.run(model.loss, {model.x: np.zeros([2, 3])})
        session.run(model.loss, model.batch(0))


def three_products(keep):
    with tf.Graph().as_default() as graph:
        x = tf1.get_variable("x", [8, 8], initializer=tf1.ones_initializer())
        first = tf.matmul(x, x, name="first")
        with keep():
            kept = tf.matmul(first, x, name="kept")
        total = tf.reduce_sum(tf.matmul(kept, x, name="last"))
        return graph, total, tf1.global_variables_initializer()


@pytest.mark.parametrize("mode", ["mixed_float16", "fp16", "cube_fp16in_fp32out"])
def test_keep_dtype_scope(mode, monkeypatch):
    if mode.startswith("cube"):
        monkeypatch.delenv(IMITATION)
    graph, total, init = three_products(keep_dtype_scope)
    with session_of(graph, precision_of(precision_mode_v2=mode)) as session:
        session.run(init)
        nodes = run_with_graph(session, total)[1]
    assert names_in(nodes, "float16") == {"first", "last"}
    assert names_in(nodes, "float32") == {"kept"}


def test_keep_dtype_scope_in_a_prepared_run():
    """Returns the fetches of TF 1 Keras from a session."""
    graph, total, init = three_products(keep_dtype_scope)
    with session_of(graph, precision_of(precision_mode_v2="mixed_float16")) as session:
        session.run(init)
        options = config_pb2.CallableOptions(fetch=[total.name])
        options.run_options.output_partition_graphs = True
        run, metadata = session._make_callable_from_options(options), tf1.RunMetadata()
        run(run_metadata=metadata)
        with pytest.raises(KeyError, match="lost"):
            session._make_callable_from_options(config_pb2.CallableOptions(fetch=["lost:0"]))
    nodes = [node for part in metadata.partition_graphs for node in part.node]
    assert (names_in(nodes, "float16"), names_in(nodes, "float32")) == ({"first", "last"}, {"kept"})


def test_keep_dtype_in_a_loop():
    with classic_loops(), tf.Graph().as_default() as graph:
        x = tf1.get_variable("x", [8, 8], initializer=tf1.ones_initializer())

        def body(count, value):
            with keep_dtype_scope():
                value = tf.matmul(value, x, name="kept")
            return count + 1, tf.matmul(value, x, name="low")

        total = tf.reduce_sum(tf1.while_loop(lambda count, _: count < 2, body, [0, x * 1.0])[1])
        init = tf1.global_variables_initializer()
    with session_of(graph, precision_of(precision_mode_v2="mixed_float16")) as session:
        session.run(init)
        nodes = run_with_graph(session, total)[1]
    assert (names_in(nodes, "float32"), names_in(nodes, "float16")) == ({"while/kept"}, {"while/low"})


def test_mixlist(tmp_path):
    path = tmp_path / "mixlist.json"
    path.write_text(json.dumps({"black-list": {"to-add": ["Relu"]}, "white-list": {"to-add": ["Square"]}}))
    nodes = nodes_of_step(precision_of(precision_mode_v2="mixed_float16", modify_mixlist=str(path)))
    assert kernels_of(nodes, "Relu") == {"float32": 2}  # what follows a denied operator stays too
    assert dtypes_of(nodes, "Square") == {"float16": 1}
    path.write_text(json.dumps({"black-list": {"to-add": ["MatMul"]}}))
    nodes = nodes_of_step(precision_of(precision_mode_v2="mixed_float16", modify_mixlist=str(path)))
    assert dtypes_of(nodes) == {"float32": 5}


def test_customize_dtypes(tmp_path):
    path = tmp_path / "dtypes.txt"

    def executed(text, **keys):
        path.write_text(text, encoding="utf-8-sig")
        graph, total, init = three_products(contextlib.nullcontext)
        with session_of(graph, precision_of(customize_dtypes=str(path), **keys)) as session:
            session.run(init)
            return run_with_graph(session, total)[1]

    one = "kept::InputDtype:{0},{0},OutputDtype:{0}"
    nodes = executed(one.format("float32"), precision_mode_v2="mixed_float16")
    assert names_in(nodes, "float32") == {"kept"}
    nodes = executed(one.format("float16"))
    assert names_in(nodes, "float16") == {"kept"}
    nodes = executed("OpType::MatMul:InputDtype:float16,float16,OutputDtype:float16\n" + one.format("float32"))
    assert names_in(nodes, "float16") == {"first", "last"}
    with pytest.raises(ValueError, match="bfloat16 and float16"):
        executed(one.format("bfloat16"), precision_mode_v2="mixed_float16")


def rule_file(tmp_path, *lines):
    path = tmp_path / "dtypes.txt"
    path.write_text("\n".join(lines))
    return str(path)


def test_a_rule_for_no_operator_of_a_training_is_named(tmp_path, caplog):
    model, rules = Dense(), [f"{name}:InputDtype:float32,float32,OutputDtype:float32" for name in ("first:", "secnod:")]
    precision = precision_of(precision_mode_v2="mixed_float16", customize_dtypes=rule_file(tmp_path, *rules))
    with session_of(model.graph, precision) as session:
        session.run(model.init)
        assert "has no operator" not in caplog.text
        session.run(model.train_op, model.batch(0))
    assert caplog.text.count("customize_dtypes: the graph has no operator 'secnod'. ") == 1
    assert "Did you mean 'second'?" in caplog.text and "'first'" not in caplog.text


@pytest.mark.parametrize("mode", ["origin", "mixed_float16", "mixed_bfloat16"])
def test_single_inputs_and_outputs_are_rounded(tmp_path, mode):
    """A product of float16 values, added up and given in float32: what rule files ask for most."""
    path = rule_file(
        tmp_path,
        "OpType::MatMulV2:InputDtype:float16,float16,float32,OutputDtype:float32",
        "second::InputDtype:float32,bfloat16,OutputDtype:float16",
    )
    random = np.random.RandomState(3)
    left, right, last = (random.randn(*shape).astype("f") for shape in ((4, 8), (8, 16), (16, 2)))
    with tf.Graph().as_default() as graph:
        fed = [tf1.placeholder(tf.float32, value.shape) for value in (left, right, last)]
        first = tf.matmul(fed[0], fed[1], name="first")
        second = tf.matmul(first, fed[2], name="second")
        result = tf.identity(second) + 0.0
        graph.finalize()
    with session_of(graph, precision_of(precision_mode_v2=mode, customize_dtypes=path)) as session:
        (got_first, got), nodes = run_with_graph(session, [first, result], dict(zip(fed, (left, right, last))))
    halves = [value.astype(np.float16).astype("f") for value in (left, right)]
    brain = last.astype(tf.bfloat16.as_numpy_dtype).astype("f")
    with tf.Graph().as_default(), tf1.Session() as stock:
        np.testing.assert_array_equal(got_first, stock.run(tf.matmul(*halves)))
        np.testing.assert_array_equal(got, stock.run(tf.matmul(got_first, brain)).astype(np.float16).astype("f"))
    assert kernels_of(nodes) == {"float32": 2}
    assert graph.finalized


def test_two_readers_of_one_tensor_have_it_rounded_to_dtypes_of_their_own(tmp_path):
    path = rule_file(
        tmp_path,
        "first::InputDtype:float16,float32,OutputDtype:float32",
        "second::InputDtype:bfloat16,float32,OutputDtype:float32",
    )
    with tf.Graph().as_default() as graph:
        fed = tf1.placeholder(tf.float32, [2])
        both = [tf.raw_ops.Mul(x=fed, y=tf.ones([2]), name=name) for name in ("first", "second")]
        results = [tf.identity(each) for each in both]
    with session_of(graph, precision_of(customize_dtypes=path)) as session:
        half, brain = session.run(results, {fed: [70000.0, 1.001]})
    np.testing.assert_array_equal(half, np.array([np.inf, np.float16(1.001)], "f"))
    np.testing.assert_array_equal(brain, tf.cast(tf.cast([70000.0, 1.001], tf.bfloat16), tf.float32))


def test_an_output_is_rounded_where_an_input_that_is_handed_on_is_not(tmp_path):
    path = rule_file(tmp_path, "OpType::Maximum:InputDtype:float16,float32,OutputDtype:float16")
    with tf.Graph().as_default() as graph:
        fed = [tf1.placeholder(tf.float32, [2]) for _ in range(2)]
        larger = tf.identity(tf.maximum(*fed))
    with session_of(graph, precision_of(customize_dtypes=path)) as session:
        values = session.run(larger, dict(zip(fed, ([0.0, 1.0001], [1.0001, 0.0]))))
    np.testing.assert_array_equal(values, np.float32(np.float16([1.0001, 1.0001])))


def test_rounding_inside_loops_and_of_operators_made_later(tmp_path):
    path = rule_file(tmp_path, "OpType::MatMul:InputDtype:float16,float16,OutputDtype:float32")
    value = np.random.RandomState(4).randn(6, 6).astype("f")
    exact, half = value.copy(), value.copy()
    with tf.Graph().as_default() as graph, classic_loops(), contextlib.ExitStack() as stack:
        weights = tf1.get_variable("weights", initializer=value, use_resource=False)
        looped = tf1.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, tf.matmul(x, weights)), [0, weights])[1]
        session = stack.enter_context(session_of(graph, precision_of(customize_dtypes=path)))
        session.run(weights.initializer)
        for _ in range(3):
            half = half.astype(np.float16).astype("f") @ value.astype(np.float16).astype("f")
            exact = exact @ value
        np.testing.assert_allclose(session.run(looped), half, rtol=1e-6)
        assert np.abs(half - exact).max() > 1e-4
        later = tf.matmul(looped, weights)
        half = half.astype(np.float16).astype("f") @ value.astype(np.float16).astype("f")
        # Processors add up in different orders, which shows where large terms cancel.
        np.testing.assert_allclose(session.run(later), half, rtol=1e-5, atol=1e-7 * np.abs(half).max())
