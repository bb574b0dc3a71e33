"""Stages stand in one order, whatever the order of the list; what cannot be ordered is refused where it is made."""

from __future__ import annotations

import itertools

import pytest
import tensorflow as tf

from npu_bridge import stages
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.gradients import AllReduce, LossScaling, NarrowVariableGuard, OverflowCheck, Pipeline
from npu_bridge.gradients.first_step.planned_collectives import plan_collectives
from tests.goldens.two_layers import in_graph
from tests.refusing import refuses

tf1 = tf.compat.v1


class First(stages.Stage):
    pass


class Second(stages.Stage):
    pass


class Lost(stages.Stage):
    place = "nowhere"


def one_of_each():
    return [
        LossScaling(FixedLossScaleManager(8)),
        stages.Freeze({"groups": 2}),
        stages.Accumulate(2),
        stages.ClipLocally(1.0),
        AllReduce("order"),
        OverflowCheck("order", is_joint=True, checks_local_gradients=True),
        stages.ClipByValue(1.0),
        stages.ClipByGlobalNorm(1.0),
        stages.CentralizeGradients(),
        First(),
        NarrowVariableGuard(),
    ]


def test_every_pair_and_every_rotation_gives_the_one_order():
    expected = one_of_each()
    for start in range(len(expected)):
        assert Pipeline([*expected[start:], *expected[:start]]).stages == tuple(expected)
    assert Pipeline(expected[::-1]).stages == tuple(expected)
    needing = {"Accumulate", "ClipLocally", "ClipByValue", "ClipByGlobalNorm"}
    for pair in itertools.combinations(expected, 2):
        kinds = {type(stage).__name__ for stage in pair}
        if kinds & needing and "OverflowCheck" not in kinds:
            with pytest.raises(ValueError, match="needs a verdict"):
                Pipeline(pair[::-1])
        elif "OverflowCheck" in kinds and "AllReduce" not in kinds:
            with pytest.raises(ValueError, match="OverflowCheck needs reduced gradients"):
                Pipeline(pair[::-1])
        else:
            assert Pipeline(pair[::-1]).stages == pair


def test_several_stages_of_ones_own_stand_in_the_order_of_the_list():
    first, second, guard = First(), Second(), NarrowVariableGuard()
    assert Pipeline([guard, second, first]).stages == (second, first, guard)
    assert Pipeline([first, guard, second]).stages == (first, second, guard)


@refuses(
    ([Lost()], ValueError, ["Lost", "nowhere", "scale, freeze, accumulate"]),
    ([stages.Accumulate], TypeError, ["Accumulate(...)"]),
    (["Accumulate"], TypeError, ["not a stage"]),
    ([AllReduce("a"), AllReduce("b")], ValueError, ["AllReduce, AllReduce", "Keep one"]),
    (
        [stages.ClipByValue(1.0), OverflowCheck("a", is_joint=False), stages.ClipByValue(2.0)],
        ValueError,
        ["ClipByValue and ClipByValue", "same place", "Keep one"],
    ),
)
def test_what_cannot_be_ordered_names_both_stages_and_the_right_order(wrong):
    Pipeline(wrong)


@in_graph
def test_the_way_of_gradients_is_told_in_its_order():
    inner, added = tf1.train.GradientDescentOptimizer(0.1), [stages.ClipByGlobalNorm(1.0), stages.Accumulate(2)]
    manager = FixedLossScaleManager(8)
    text = stages.explain(NPUOptimizer(inner, manager, True, True, stages=added))
    names = ["LossScaling", "Accumulate(steps=2, reduction='mean')", "AllReduce", "OverflowCheck", "ClipByGlobalNorm"]
    assert [line.split()[0] for line in text.splitlines()] == ["1", "2", "3", "4", "5", "6"]
    assert all(name in line for name, line in zip(names, text.splitlines())), text
    assert "needs a verdict" in text.splitlines()[1]
    nested = stages.explain(NPULossScaleOptimizer(NPUDistributedOptimizer(inner), manager, True))
    assert nested.splitlines()[0].startswith(" 1 reduce")
    assert "Accumulate" in stages.explain(npu_keras_optimizer(tf.keras.optimizers.legacy.SGD(), stages=added))
    assert "unchanged" in stages.explain(NPUOptimizer(inner))
    with pytest.raises(TypeError, match="Pass what"):
        stages.explain(inner)


@in_graph
def test_an_optimizer_says_what_it_wraps_and_does():
    inner, manager, added = tf1.train.AdamOptimizer(0.1), FixedLossScaleManager(8), [stages.ClipByValue(1.0)]
    assert repr(NPUOptimizer(inner)) == "NPUOptimizer(AdamOptimizer, stages=[])"
    text = repr(NPUOptimizer(inner, manager, True, True, stages=added))
    assert text.startswith("NPUOptimizer(AdamOptimizer, stages=[LossScaling(FixedLossScaleManager), AllReduce(), Over")
    assert "ClipByValue(low=-1.0, high=1.0)" in text
    nested = repr(NPULossScaleOptimizer(NPUDistributedOptimizer(inner, wire="bfloat16"), manager, True))
    assert nested.startswith("NPULossScaleOptimizer(NPUDistributedOptimizer(AdamOptimizer, stages=[AllReduce(wire='bf")
    for family in (tf.keras.optimizers, tf.keras.optimizers.legacy):
        assert "(Adam, stages=[LossScaling(Fixed" in repr(npu_keras_optimizer(family.Adam(), manager))


@in_graph
def test_stages_that_need_true_units_are_refused_inside_loss_scaling():
    """With error feedback what was not sent would be added to gradients of another scale."""

    def nested(stage):
        inner = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(0.1), stages=[stage])
        return NPULossScaleOptimizer(inner, FixedLossScaleManager(8), True)

    for stage in (stages.TopK(0.1), stages.Threshold(0.1, error_feedback=False), stages.ClipByGlobalNorm(1.0)):
        with pytest.raises(ValueError, match=f"{type(stage).__name__}.* inside"):
            nested(stage)
    assert nested(stages.TopK(0.1, error_feedback=False)) and nested(stages.Adasum())


def test_stages_are_drawn_over_their_own_picture_and_over_no_other(tmp_path):
    optimizer, picture = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.1)), tmp_path / "a.svg"
    for _ in range(2):
        stages.explain(optimizer, svg=str(picture))
    picture.write_text("<svg>mine</svg>")
    with pytest.raises(FileExistsError, match="a.svg is a file that npu_bridge did not make"):
        stages.explain(optimizer, svg=str(picture))
    assert picture.read_text() == "<svg>mine</svg>"


@refuses(
    (lambda: stages.Accumulate(2, "median"), ValueError, "'median'"),
    (lambda: stages.ClipByValue(2, 1), ValueError, "low=2, high=1"),
    (lambda: stages.ClipLocally(None), TypeError, "ClipLocally"),
    (lambda: stages.TopK(0.1, error_feedback=1), TypeError, "1 (int)"),
    (lambda: stages.TopK(0.1, per="bucket"), ValueError, "'tensor' or 'fragment'"),
    (lambda: stages.Adasum("hosts"), TypeError, "at least 1"),
    (lambda: stages.Adasum(on="deltas"), ValueError, "'gradients' or 'weights'"),
    (lambda: stages.CentralizeGradients("bias"), TypeError, "'bias' (str)"),
    (lambda: stages.CentralizeGradients({}), TypeError, "skip is not a list of texts. Expected a list of texts"),
)
def test_bad_arguments_are_refused_at_construction(make):
    make()


@in_graph
def test_optimizers_refuse_what_is_no_list_of_stages():
    inner = tf1.train.GradientDescentOptimizer(0.1)
    makers = [
        lambda given: NPUOptimizer(inner, stages=given),
        lambda given: NPUDistributedOptimizer(inner, stages=given),
        lambda given: npu_keras_optimizer(tf.keras.optimizers.SGD(), stages=given),
    ]
    for make in makers:
        with pytest.raises(TypeError, match="Write stages="):
            make(stages.Accumulate(2))
        with pytest.raises(ValueError, match="Accumulate and Accumulate"):
            make([stages.Accumulate(2), stages.Accumulate(2)])
    with pytest.raises(ValueError, match="wire='none'"):
        NPUDistributedOptimizer(inner, wire="float16", stages=[stages.TopK(0.1)])


def test_a_method_that_no_pipeline_calls_is_named(caplog):
    class Misspelt(stages.Stage):
        def after_reduced(self, step):
            pass

    class WithHelper(stages.Stage):
        def after_reduce(self, step):
            self._halve(step)

        def _halve(self, step):
            step.map(lambda grad: grad / 2)

    (line,) = caplog.messages
    assert line.startswith("Misspelt: no pipeline calls the method after_reduced.")
    assert "Did you mean 'after_reduce'?" in line


class Counting(stages.Stage):
    def __init__(self, start):
        self._start, self._module = start, tf.Module()

    def get_config(self):
        return {"start": self._start}

    def state(self):
        return {"count": self._module}


def test_two_stages_of_one_class_are_both_compared_and_their_states_need_two_names():
    """The first one's settings and state would be lost."""
    twice = Pipeline([Counting(1), Counting(2)])
    settings = plan_collectives(twice.stages, [], False).settings
    assert settings == {"Counting": "{'start': 1}", "Counting 2": "{'start': 2}"}
    with pytest.raises(ValueError, match="two stages save their state under the name 'count'.*Counting, Counting"):
        twice.state()
