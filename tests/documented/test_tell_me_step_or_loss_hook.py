from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.base.environment import read_variable, write_variable
from npu_bridge.estimator.npu.npu_hook import TellMeStepOrLossHook
from tests.documented.signatures import signature_of

VARIABLES = ("STEP_NOW", "TOTAL_STEP", "LOSS_NOW", "TARGET_LOSS")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")


def said():
    return tuple(read_variable(name) for name in VARIABLES)


def steps(hook, count=2, use_resource=True):
    """Trains and gives what the variables say after every run."""
    seen = []
    with tf.Graph().as_default():
        step = tf.compat.v1.get_variable("count", initializer=0, trainable=False, use_resource=use_resource)
        loss = tf.constant(2.5, name="loss")
        train_op = step.assign_add(1)
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
            for _ in range(count):
                session.run([train_op, loss])
                seen.append(said())
    return seen


def test_signature():
    assert signature_of(TellMeStepOrLossHook) == "(step=None, total_step=None, loss=None, final_loss=None)"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({"step": "global_step:0", "total_step": 100}, ("0", "100", None, None)),
        ({"loss": "loss:0", "final_loss": 1.1}, (None, None, "0.0", "1.1")),
        ({"step": "s", "total_step": 1e4, "loss": "l", "final_loss": 2}, ("0", "10000.0", "0.0", "2")),
    ],
)
def test_the_constructor_writes_variables(arguments, expected):
    TellMeStepOrLossHook(**arguments)
    assert said() == expected


def test_nothing_to_tell():
    with pytest.raises(ValueError, match="step or loss"):
        TellMeStepOrLossHook(total_step=10, final_loss=1.0)


@pytest.mark.parametrize("use_resource", [True, False])
def test_a_variable_is_read_after_the_run(use_resource):
    hook = TellMeStepOrLossHook(step="count:0", total_step=5)
    assert steps(hook, use_resource=use_resource) == [("1", "5", None, None), ("2", "5", None, None)]


def test_tensors_of_the_run_by_name_on_one_graph_after_the_other():
    hook = TellMeStepOrLossHook(step="count", total_step=5, loss="loss", final_loss=1)
    for _ in range(2):
        assert steps(hook)[-1] == ("2", "5", "2.5", "1")


def test_each_training_has_the_goal_of_its_own_hook():
    hooks = [TellMeStepOrLossHook(step="count", total_step=total) for total in (5, 9)]
    assert [steps(hook)[-1][1] for hook in hooks] == ["5", "9"]
    assert said() == (None,) * 4  # which would decide about a training without a hook


def test_a_resumed_training_does_not_start_at_0(graph):
    hook = TellMeStepOrLossHook(step=tf.compat.v1.get_variable("count", initializer=7), total_step=9)
    hook.begin()
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        write_variable("STEP_NOW", 0)
        hook.after_create_session(session, None)
    assert said()[0] == "7"


def test_a_tensor_the_graph_does_not_have():
    with pytest.raises(ValueError, match="lost"):
        steps(TellMeStepOrLossHook(loss="lost:0"))
