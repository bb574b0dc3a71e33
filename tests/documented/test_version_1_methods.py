"""Methods and arguments of TensorFlow 1.15's classes on the classes that scripts get instead."""

from __future__ import annotations

import inspect
import os

import numpy as np
import pytest

from npu_bridge.estimator.npu import npu_hook, npu_loss_scale_optimizer, npu_optimizer
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_saver import NPUBulkSaverBuilder, NPUSaver
from npu_bridge.npu_init import tf as tf1
from npu_bridge.optimizers import tf1 as rules
from tests.documented.version_1_facts import METHODS

FACES = [
    (NPUEstimator, "estimator.Estimator"),
    (NPURunConfig, "estimator.RunConfig"),
    (NPUEstimatorSpec, "estimator.EstimatorSpec"),
    (NPUSaver, "train.Saver"),
    (tf1.Session, "Session"),
    (tf1.InteractiveSession, "InteractiveSession"),
    (npu_optimizer.NPUOptimizer, "train.Optimizer"),
    (npu_optimizer.NPUDistributedOptimizer, "train.Optimizer"),
    (npu_loss_scale_optimizer.NPULossScaleOptimizer, "train.Optimizer"),
    (rules.LAMB, "train.Optimizer"),
    (npu_hook.NPUCheckpointSaverHook, "train.CheckpointSaverHook"),
    (npu_hook.NPUOutputTensorHook, "train.LoggingTensorHook"),
    *((getattr(npu_hook, name), "train.SessionRunHook") for name in npu_hook.__all__ if name.endswith("Hook")),
]
# Constructors that the documentation gives other arguments.
OWN_CONSTRUCTORS = (NPURunConfig, tf1.train.Optimizer, npu_hook.NPUOutputTensorHook)


@pytest.mark.parametrize("face, name", FACES, ids=lambda value: getattr(value, "__name__", value))
def test_every_method_takes_the_arguments_of_1_15(face, name):
    for method, arguments in METHODS[name].items():
        assert hasattr(face, method), f"{face.__name__}.{method}"
        if arguments is None or (method == "__init__" and issubclass(face, OWN_CONSTRUCTORS)):
            continue
        taken = [parameter for parameter in inspect.signature(getattr(face, method)).parameters if parameter != "self"]
        wanted = arguments.split()
        if face is NPUEstimator and method == "__init__":  # documented with one more before the last
            taken.remove("job_start_file")
        assert taken[: len(wanted)] == wanted, f"{face.__name__}.{method}"


def test_a_run_config_takes_every_keyword_of_1_15():
    stock = tf1.estimator.RunConfig()
    names = METHODS["estimator.RunConfig"]["__init__"].split()
    given = {name: getattr(stock, f"_{name}", None) for name in names} | {"save_checkpoints_secs": None}
    given |= {"device_fn": lambda op: "/cpu:0", "protocol": "grpc", "session_creation_timeout_secs": 60}
    config = NPURunConfig(**given)
    assert {name: getattr(config, f"_{name}", None) for name in given} == given | {"save_checkpoints_steps": 100}
    assert config.device_fn(None) == "/cpu:0" and config.protocol == "grpc"
    assert config.replace(protocol="grpc+verbs").device_fn is config.device_fn
    with pytest.raises(ValueError, match=r"protocol='grpc'.*device_fn=config\.device_fn"):
        NPUEstimator(lambda features: None, config=tf1.estimator.RunConfig(protocol="grpc", device_fn=config.device_fn))


def test_a_saver_made_from_its_description_is_one_of_these(graph, tmp_path):
    variable = tf1.get_variable("variable", initializer=[1.0])
    saver = NPUSaver.from_proto(NPUSaver().to_proto())
    assert type(saver) is NPUSaver
    with tf1.Session() as session:
        session.run(variable.initializer)
        assert os.path.exists(saver.save(session, str(tmp_path / "model")) + ".index")


@pytest.mark.parametrize("method", ["__init__", "save", "restore"])
def test_signatures_are_those_of_the_stock_saver(method):
    assert inspect.signature(getattr(NPUSaver, method)) == inspect.signature(getattr(tf1.train.Saver, method))


def test_an_ordinary_graph_is_saved_and_restored(graph, tmp_path):
    variable = tf1.get_variable("variable", initializer=[1.0, 2.0])
    saver = NPUSaver(max_to_keep=2, builder=NPUBulkSaverBuilder())
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        paths = [saver.save(session, str(tmp_path / "model"), global_step=step) for step in range(3)]
        assert [os.path.exists(path + ".index") for path in paths] == [False, True, True]
        session.run(variable.assign([0.0, 0.0]))
        saver.restore(session, paths[-1])
        np.testing.assert_array_equal(session.run(variable), [1.0, 2.0])
