"""The documented Keras callbacks in one process; what they do between ranks is in tests/ranks/test_keras.py."""

from __future__ import annotations

import inspect

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import npu_callbacks
from npu_bridge.estimator.npu.npu_callbacks import NPUBroadcastGlobalVariablesCallback
from npu_bridge.estimator.npu.npu_helpers import npu_callbacks_append
from tests.goldens.keras_models import OPTIMIZERS, fit, make_data, make_model


def test_documented_names():
    assert npu_callbacks.__all__ == ["NPUBroadcastGlobalVariablesCallback", "broadcast_global_variables"]
    for documented in (NPUBroadcastGlobalVariablesCallback, npu_callbacks.broadcast_global_variables):
        (parameter,) = inspect.signature(documented).parameters.values()
        assert (parameter.name, parameter.default) == ("root_rank", inspect.Parameter.empty)
    assert issubclass(NPUBroadcastGlobalVariablesCallback, tf.keras.callbacks.Callback)


def test_with_one_rank_it_does_nothing():
    data = make_data(2)
    with_callback, losses = fit(
        OPTIMIZERS["current adam"](), data, callbacks=[NPUBroadcastGlobalVariablesCallback(7)], run_eagerly=True
    )
    _, expected = fit(OPTIMIZERS["current adam"](), data, run_eagerly=True)
    assert losses == expected
    with_callback.evaluate(*data, verbose=0, callbacks=[NPUBroadcastGlobalVariablesCallback(0)])


def test_the_op_belongs_to_the_keras_session():
    with pytest.raises(RuntimeError, match="Pass NPUBroadcastGlobalVariablesCallback to fit"):
        npu_callbacks.broadcast_global_variables(0)
    with tf.Graph().as_default():
        model = make_model()
        before = model.get_weights()
        tf.compat.v1.keras.backend.get_session().run(npu_callbacks.broadcast_global_variables(0))
        assert all((value == kept).all() for value, kept in zip(model.get_weights(), before))


OWN = tf.keras.callbacks.Callback()


@pytest.mark.parametrize(
    "given, kept, speaks", [((OWN,), [OWN], False), ([OWN], [OWN], False), (None, [], False), (3, [], True)]
)
def test_callbacks_append(given, kept, speaks, caplog):
    appended = npu_callbacks_append(callbacks_list=given)
    assert appended[:-1] == kept
    assert isinstance(appended[-1], NPUBroadcastGlobalVariablesCallback)
    assert (appended is given) == isinstance(given, list)
    assert ("npu_callbacks_append: callbacks_list is not a list" in caplog.text) == speaks
