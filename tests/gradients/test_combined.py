"""Combined gradients: one division and one check for many, with the bits of single ones, up to a fused update."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import amp
from npu_bridge.base.flat_tensors import (
    contiguous_slice,
)
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients.combined import CombinedGradients, check_pieces
from npu_bridge.gradients.step import Step
from npu_bridge.optimizers import keras, keras_legacy, tf1
from npu_bridge.stages import Accumulate, ClipByGlobalNorm, ClipByValue, Freeze, FreezeSchedule
from tests.rank_pool import on_each_rank

v1 = tf.compat.v1
SHAPES = ([4, 6], [5], [], [7], [3, 2])
SCALE = 1000.0  # no power of two, so that dividing rounds
GROUPS = [{"match": "v1|v3", "lr": 0.02}]
PER_STAGES = {
    "alone": lambda: (),
    "clipped": lambda: [ClipByValue(0.1), ClipByGlobalNorm(0.5)],
    "in a window": lambda: [Accumulate(2)],
    "frozen": lambda: [Freeze(FreezeSchedule([["v0", "v1"], ["v2", "v3", "v4"]], "explicit", sequence=[0, 1]))],
}
TF1 = {
    "stock": lambda: v1.train.AdamOptimizer(0.01),
    "fused": lambda: tf1.RMSProp(0.01, fused=True),
    "fused groups": lambda: tf1.Adam(0.01, fused=True, groups=GROUPS),
    "fused norms": lambda: tf1.LAMB(0.01, fused=True),
    "Keras": lambda: tf.keras.optimizers.legacy.Adam(0.01),
}
KERAS = {
    "stock": lambda: tf.keras.optimizers.Adam(0.01),
    "legacy": lambda: tf.keras.optimizers.legacy.Adam(0.01),
    "legacy rule": lambda: keras_legacy.Adam(0.01),
    "fused": lambda: keras.RMSProp(0.01, fused=True),
    "fused groups": lambda: keras.Adam(0.01, fused=True, groups=GROUPS),
}


def fed_gradients(steps=6, overflow_at=2):
    """Gradients of several magnitudes, one step with an overflow."""
    random = np.random.RandomState(4)
    steps = [[random.randn(*shape) * 10.0 ** random.uniform(-4, 1) for shape in SHAPES] for _ in range(steps)]
    steps[overflow_at][3][2] = np.inf
    return steps


def manager():
    return ExponentialUpdateLossScaleManager(SCALE, 3, 1)


def starts():
    random = np.random.RandomState(3)
    return [np.asarray(random.randn(*shape), np.float32) for shape in SHAPES]


def trained_in_a_graph(make, stages, **options):
    """Returns the values of a session after some steps, by name, and the types of the graph's ops."""
    with tf.Graph().as_default() as graph:
        variables = [v1.get_variable(f"v{n}", initializer=value, use_resource=True) for n, value in enumerate(starts())]
        fed = [v1.placeholder(tf.float32, variable.shape) for variable in variables]
        optimizer = NPUOptimizer(make(), manager(), is_loss_scale=True, stages=stages, **options)
        loss = tf.add_n([tf.reduce_sum(variable * grad) for variable, grad in zip(variables, fed)])
        step = optimizer.minimize(loss, var_list=variables)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for gradients in fed_gradients():
                session.run(step, dict(zip(fed, gradients)))
            kept = v1.global_variables()
            return dict(zip([v.op.name for v in kept], session.run(kept))), graph


@pytest.mark.few_fast(2, "other optimizers and stages are joined alike")
@pytest.mark.parametrize(
    "made, stages", [*((made, "alone") for made in TF1), *(("fused groups", stages) for stages in PER_STAGES)]
)
def test_the_bits_of_a_graph_are_those_of_single_gradients(made, stages):
    """Variables, slots, counters and the loss scale, through an overflow."""
    expected, _ = trained_in_a_graph(TF1[made], PER_STAGES[stages]())
    options = {"combine_grad": True, "check_combined_tensors": stages != "alone"}
    found, _ = trained_in_a_graph(TF1[made], PER_STAGES[stages](), **options)
    assert list(found) == list(expected)
    assert not [name for name in found if found[name].tobytes() != expected[name].tobytes()]
    assert any(np.any(expected[f"v{n}"] != value) for n, value in enumerate(starts()))


@pytest.mark.few_fast(2, "other optimizers and stages are joined alike")
@pytest.mark.parametrize("made, is_function", [*((made, True) for made in KERAS), ("fused groups", False)])
def test_the_bits_of_keras_are_those_of_single_gradients(made, is_function):
    def trained(**options):
        variables = [tf.Variable(value, name=f"v{n}") for n, value in enumerate(starts())]
        optimizer = npu_keras_optimizer(KERAS[made](), manager(), **options)

        def step(gradients):
            optimizer.minimize(
                lambda: tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, gradients)]), variables
            )

        step = tf.function(step) if is_function else step
        for gradients in fed_gradients():
            step([tf.constant(grad, tf.float32) for grad in gradients])
        kept = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        return [value.numpy().tobytes() for value in (*variables, *kept)]

    expected = trained()
    assert trained(combine_grad=True, check_combined_tensors=True) == expected


def test_one_division_one_check_and_no_second_join_on_the_way_to_a_fused_update():
    def counts(stages, **options):
        _, graph = trained_in_a_graph(lambda: tf1.Adam(0.01, fused=True, groups=GROUPS), stages, **options)
        ops = [op for op in graph.get_operations() if "flat_slots" not in op.name]
        in_scope = [op for op in ops if "combined_gradients" in op.name]
        return {
            "divisions": sum(op.type == "RealDiv" and op.inputs[0].shape.rank is not None for op in ops),
            "checks": sum(op.type == "L2Loss" for op in ops),
            "joins": sum(op.type == "ConcatV2" for op in ops),
            "joins there": sum(op.type == "ConcatV2" for op in in_scope),
            "updates": sum(op.type == "ResourceApplyAdam" for op in ops),
        }

    single, combined = counts(()), counts((), combine_grad=True)
    assert single["checks"] == len(SHAPES) and single["joins"] == 2 and single["updates"] == 2
    # The two groups of the optimizer are what is joined: each has one division, one check and one update.
    assert combined["checks"] == 2 and combined["updates"] == 2
    assert combined["divisions"] == single["divisions"] - len(SHAPES) + 2
    assert combined["joins"] == combined["joins there"] == 2
    clipped = counts([ClipByValue(0.1), ClipByGlobalNorm(0.5)], combine_grad=True)
    assert clipped["joins"] == 2


def test_the_check_names_the_first_variable_that_differs():
    singles = [tf.constant([1.0, np.nan]), tf.constant([[3.0]]), tf.constant([4.0, np.inf])]
    names = ["kernel", "bias", "scale"]
    check_pieces("of_test", tf.constant([1.0, np.nan, 3.0, 4.0, np.inf]), singles, names)
    with pytest.raises(tf.errors.InvalidArgumentError, match="(?s)check_combined_tensors.*single gradients.*bias"):
        check_pieces("of_test", tf.constant([1.0, np.nan, 3.5, 4.5, np.inf]), singles, names)
    for flat, text in (
        (tf.constant([1.0, 2.0, 3.0], tf.float64), "kernel does not fit"),
        (tf.constant([1.0, np.nan, 3.0, 4.0]), "scale does not fit"),
        (tf.constant([1.0] * 6), "another size than kernel, bias, scale"),
    ):
        with pytest.raises(ValueError, match=f"of_test: .*{text}.*Combine the gradients again"):
            check_pieces("of_test", flat, singles, names)
    with tf.Graph().as_default(), v1.Session() as session:
        flat = v1.placeholder(tf.float32, [5])
        op = check_pieces("of_test", flat, [tf.constant(single.numpy()) for single in singles], names)
        session.run(op, {flat: [1.0, np.nan, 3.0, 4.0, np.inf]})
        with pytest.raises(tf.errors.InvalidArgumentError, match="scale"):
            session.run(op, {flat: [1.0, np.nan, 3.0, 4.0, 5.0]})


def test_other_variables_are_combined_again_and_what_cannot_be_joined_stays_alone(caplog):
    one, two, three = (tf.Variable(tf.ones([2]), name=name) for name in ("one", "two", "three"))
    sparse = tf.IndexedSlices(tf.constant([[8.0]]), tf.constant([1]), tf.constant([2, 1]))
    combining = CombinedGradients("of_test", is_checked=True)

    def unscaled(*pairs):
        step = Step(list(pairs), divisor=tf.constant(4.0))
        combining.unscale(step)
        return [grad for grad, _ in step.grads_and_vars]

    grad = tf.constant([4.0, 8.0])
    with caplog.at_level("INFO"):
        first = unscaled((grad, one), (None, two), (sparse, three), (grad, three))
        assert not caplog.messages
        second = unscaled((grad, one), (grad, two))
    (said,) = caplog.messages
    assert "of_test: gradients are combined again" in said and "three:0, two:0" in said
    assert first[1] is None and first[2].values.numpy() == [[2.0]]
    for found in (first[0], first[3], *second):
        np.testing.assert_array_equal(found, [1.0, 2.0])
    assert contiguous_slice([first[0], first[3]]) is not None and contiguous_slice(second) is not None
    (alone,) = unscaled((tf.constant([4.0], tf.float16), one))
    assert alone.dtype == tf.float32 and contiguous_slice([alone]) is None


def test_options_are_checked_and_told(caplog):
    adam = v1.train.AdamOptimizer()
    with pytest.raises(ValueError, match="check_combined_tensors has nothing to check.*combine_grad=True"):
        NPUOptimizer(adam, manager(), is_loss_scale=True, check_combined_tensors=True)
    with pytest.raises(TypeError, match="combine_grad is not a boolean"):
        npu_keras_optimizer(tf.keras.optimizers.SGD(), manager(), combine_grad=1)
    for made in (
        amp.initialize(None, keras.Adam(0.01, fused=True), "O2", combine_grad=True, check_combined_tensors=True),
        npu_keras_optimizer(tf.keras.optimizers.SGD(), manager(), combine_grad=True, check_combined_tensors=True),
    ):
        again = type(made).from_config(made.get_config())
        for each in (made, again):
            assert each.backward_passes.pipeline.combined._is_checked


@pytest.mark.slow("the cases above have the same bits on one rank")
@on_each_rank(2)
def test_ranks_have_the_bits_of_single_gradients():
    """Compares them with combined ones, with a decision before and after the last fragment."""
    results = []
    for options in ({}, {"combine_grad": True, "check_combined_tensors": True}):
        made = []
        for is_tailing in (False, True):
            options = {**options, "is_distributed": True, "is_tailing_optimization": is_tailing}
            values, _ = trained_in_a_graph(
                TF1["fused groups"], (), name=f"combined_{len(results)}_{is_tailing}", **options
            )
            made.append([value.tobytes() for value in values.values()])
        results.append(made)
    expected, found = results
    assert found == expected


# Several groups, each with an optimizer of its own.


OWN_RULES = [
    {"match": "v1$", "rule": "SGD", "lr": 0.5, "momentum": 0.9, "nesterov": True},
    {"match": "v3$|v4$", "rule": "RMSProp", "lr": 0.02, "weight_decay": 0.1},
]


def of_groups(face, is_fused):
    return face.Adagrad(0.1, fused=is_fused, groups=OWN_RULES)


@pytest.mark.slow("several optimizers, each as in the other cases")
def test_each_group_can_have_an_optimizer_of_its_own():
    """Each variable ends where that optimizer alone brings it, updated together with those of its group or not."""
    alone = {
        "v0": tf1.Adagrad(0.1),
        "v1": tf1.SGD(0.5, momentum=0.9, nesterov=True),
        "v2": tf1.Adagrad(0.1),
        "v3": tf1.RMSProp(0.02, weight_decay=0.1),
        "v4": tf1.RMSProp(0.02, weight_decay=0.1),
    }
    by_itself, _ = trained_in_a_graph(lambda: of_groups(tf1, False), ())
    together, graph = trained_in_a_graph(lambda: of_groups(tf1, True), (), combine_grad=True)
    for name, optimizer in alone.items():
        expected, _ = trained_in_a_graph(lambda optimizer=optimizer: optimizer, ())
        np.testing.assert_array_equal(by_itself[name], expected[name])
        np.testing.assert_allclose(together[name], expected[name], rtol=1e-6)  # a division may round otherwise
    slots = {name: {kept.rpartition("/")[2] for kept in by_itself if kept.startswith(f"{name}/")} for name in alone}
    assert slots["v1"] == {"momentum"} and slots["v0"] == slots["v2"] and slots["v3"] == slots["v4"] != slots["v0"]
    # v0 and v2 are updated as one tensor, v3 and v4 as another one, v1 by a kernel of its own.
    divided = [op for op in graph.get_operations() if op.type == "RealDiv" and "combined_gradients" in op.name]
    assert sorted(op.inputs[0].shape.as_list() for op in divided) == [[13], [25]]


def test_optimizers_of_groups_come_back_and_misspelt_ones_are_told():
    made = of_groups(keras, True)
    again = type(made).from_config(made.get_config())
    variables = [tf.Variable(value, name=f"v{n}") for n, value in enumerate(starts())]
    others = [tf.Variable(value, name=f"v{n}") for n, value in enumerate(starts())]
    for optimizer, trained in ((made, variables), (again, others)):
        for gradients in fed_gradients(3, overflow_at=0)[1:]:
            optimizer.apply_gradients([(tf.constant(g, tf.float32), v) for g, v in zip(gradients, trained)])
    for one, other in zip(variables, others):
        np.testing.assert_array_equal(one, other)
    for group, text in (
        ({"match": ".", "rule": "Adamm"}, "group 0: unknown rule.*Did you mean 'Adam'"),
        ({"match": ".", "rule": "SGD", "momentun": 0.9}, "unknown hyper-parameter 'momentun'.*Did you mean 'momentum'"),
    ):
        with pytest.raises(ValueError, match=text):
            keras.LAMB(0.1, groups=[group])
