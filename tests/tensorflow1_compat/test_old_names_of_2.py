"""Scripts of an older TensorFlow 2 find what 2.15 has elsewhere: with `npu-run`, and in modules with `python`."""

from __future__ import annotations

import textwrap

import pytest

from npu_bridge.base.tf_internals.names import KERAS
from tests.goldens.two_layers import beside_addons
from tests.npu_run.launching import npu_run, write_script
from tests.tensorflow1_compat.test_plain_python import run

SCRIPT = """
    import numpy as np, sys
    import tensorflow as tf
    from tensorflow import keras
    from tensorflow.python.keras import backend as K
    from tensorflow.python.keras.layers import LSTM, Layer
    from keras.engine.base_layer import Layer as OldLayer
    from keras.keras_parameterized import TestCase
    import pair_pb2, patch
    assert LSTM is sys.modules["KERAS.src.layers"].LSTM and Layer is tf.keras.layers.Layer is OldLayer
    assert keras.__version__ == sys.modules["KERAS"].__version__ and np.zeros(2, np.int).dtype == np.int64
    assert tf.__version__.startswith("2.") and tf.executing_eagerly() and not hasattr(tf, "placeholder")
    tf.keras.mixed_precision.experimental.set_policy("float32")
    model = tf.keras.Sequential([LSTM(2, input_shape=(3, 1)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3, 1)), np.ones(4), verbose=0)
    assert set(patch.calls) == {"dropped"} and K.floatx() == "float32"
    assert model.predict_classes(np.ones((4, 3, 1))).shape == (4, 1)
    with tf.Graph().as_default() as graph:
        tf.constant(1) + 1
    assert graph._last_id == 3
    assert pair_pb2.Pair(left=3).left == 3 and pair_pb2._PAIR is pair_pb2.Pair.DESCRIPTOR
    adam, sgd = tf.keras.optimizers.Adam(lr=0.5), tf.keras.optimizers.SGD(0.25, decay=0.125)
    assert (float(adam.lr), float(sgd.lr), float(sgd.decay)) == (0.5, 0.25, 0.125)
    assert isinstance(tf.keras.optimizers.SGD(0.25), tf.keras.optimizers.SGD)
    assert tf.keras.optimizers.SGD is keras.optimizers.SGD is tf.optimizers.SGD is tf.keras.optimizers.legacy.SGD
    print(tf.constant(1).numpy())
"""
PATCH = """
    from keras import backend
    from keras.utils import control_flow_util
    from keras.layers.core import Dropout
    calls = []

    def call(self, inputs, training=None):
        calls.append("dropped")
        training = backend.learning_phase() if training is None else training
        return control_flow_util.smart_cond(training, lambda: inputs * 2, lambda: inputs)

    Dropout.call = call
"""
# The output of protoc 3.0 for `syntax = "proto3"; package pairs; message Pair { int32 left = 1; }`.
PAIR_PB2 = r"""
    import sys
    _b = sys.version_info[0] < 3 and (lambda x: x) or (lambda x: x.encode("latin1"))
    from google.protobuf import descriptor as _descriptor
    from google.protobuf import message as _message
    from google.protobuf import reflection as _reflection
    DESCRIPTOR = _descriptor.FileDescriptor(
        name="pair.proto", package="pairs", syntax="proto3",
        serialized_pb=_b(
            "\n\npair.proto\x12\x05pairs\"\x14\n\x04Pair\x12\x0c\n\x04left\x18\x01 \x01(\x05\x62\x06proto3"))
    _PAIR = _descriptor.Descriptor(
        name="Pair", full_name="pairs.Pair", filename=None, file=DESCRIPTOR, containing_type=None,
        fields=[_descriptor.FieldDescriptor(
            name="left", full_name="pairs.Pair.left", index=0, number=1, type=5, cpp_type=1, label=1,
            has_default_value=False, default_value=0, message_type=None, enum_type=None, containing_type=None,
            is_extension=False, extension_scope=None, options=None)],
        extensions=[], nested_types=[], enum_types=[], options=None, is_extendable=False, syntax="proto3")
    DESCRIPTOR.message_types_by_name["Pair"] = _PAIR
    Pair = _reflection.GeneratedProtocolMessageType(
        "Pair", (_message.Message,), dict(DESCRIPTOR=_PAIR, __module__="pair_pb2"))
"""


@pytest.mark.slow("the modules of such a script are fast")
def test_a_script_started_by_npu_run(tmp_path):
    write_script(tmp_path, SCRIPT.replace("KERAS", KERAS))
    write_script(tmp_path, PAIR_PB2, "pair_pb2.py")
    write_script(tmp_path, PATCH, "patch.py")
    code, output = npu_run("train.py", cwd=tmp_path, TF_CPP_MIN_LOG_LEVEL="2")
    assert code == 0 and output.splitlines()[-1] == "1", output
    assert output.count("numpy.int") == 1


OF_LEGACY = {
    "a subclass": """
        class Halved(tf.keras.optimizers.SGD):
            def __init__(self, rate, name="Halved"):
                super().__init__(rate, 0.0, False, name)
            def _resource_apply_dense(self, grad, var, apply_state=None):
                return super()._resource_apply_dense(grad / 2, var, apply_state)
        optimizer = Halved(0.5)
    """,
    "a wrapper": """
        import tensorflow_addons as tfa
        optimizer = tfa.optimizers.MovingAverage(tf.keras.optimizers.SGD(0.25), average_decay=0.0)
    """,
}


@pytest.mark.few_fast(1, "the other class takes the same way")
@pytest.mark.parametrize("kind", ["a subclass", pytest.param("a wrapper", marks=beside_addons)])
def test_optimizers_are_those_that_keras_had(tmp_path, kind):
    training = """
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.compile(optimizer, "mse")
        model.fit(np.ones((1, 1)), np.zeros((1, 1)), verbose=0)
        print("weight", model.get_weights()[0].item())
    """
    text = (
        "import numpy as np\nimport tensorflow as tf\n" + textwrap.dedent(OF_LEGACY[kind]) + textwrap.dedent(training)
    )
    write_script(tmp_path, text)
    code, output = npu_run("train.py", cwd=tmp_path, TF_CPP_MIN_LOG_LEVEL="2")
    assert code == 0 and output.splitlines()[-1] == "weight 0.5", output


@pytest.mark.slow("a start of its own")
def test_the_modules_of_a_script_that_imports_npu_device(tmp_path):
    script = """
        import tensorflow as tf
        import npu_device
        import patch, numpy as np
        from sys import modules
        model = tf.keras.Sequential([tf.keras.layers.Dropout(0.5)])
        assert model(np.ones(2)).shape == [2] and set(patch.calls) == {"dropped"} and "KERAS.src.backend" in modules
        assert type(tf).__name__ == "module"
        print("done")
    """
    write_script(tmp_path, script.replace("KERAS", KERAS))
    write_script(tmp_path, PATCH, "patch.py")
    code, output, errors = run(tmp_path)
    assert (code, output) == (0, "done\n"), errors
