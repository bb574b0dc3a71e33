"""`npu-run train.py` and `python train.py` see the same Keras, unless the script needs one that is gone."""

from __future__ import annotations

import re

import pytest

from npu_bridge.base.tf_internals.names import KERAS
from tests.goldens.keras3_models import beside_keras3
from tests.npu_run.launching import ROOT, npu_run, write_script
from tests.tensorflow1_compat.test_era import evidence_of

FIT = "import numpy as np\nm = keras.Sequential([keras.layers.Dense(1)])\nx = np.ones((4, 2), 'float32')\n"
# Each has names that every Keras has, beside what only one of them may have.
OF_TODAY = {
    "a callback": FIT
    + "m.compile('sgd', 'mse')\nm.fit(x, x, verbose=0, callbacks=[keras.callbacks.EarlyStopping('loss')])",
    "a callback by name": "from keras.callbacks import EarlyStopping\nEarlyStopping('loss')",
    "callbacks as a module": "from keras import callbacks\ncallbacks.ModelCheckpoint('x.keras')",
    "callbacks under a name": "import keras.callbacks as C\nC.CSVLogger('log.csv')",
    "a callback of its own": "class Mine(keras.callbacks.Callback):\n    def on_epoch_end(self, epoch): pass\nMine()",
    "saving": FIT + "m(x)\nm.save('m.keras')\nkeras.saving.load_model('m.keras')",
    "saving by name": "from keras.saving import load_model, register_keras_serializable\n",
    "registered": "@keras.saving.register_keras_serializable()\nclass L(keras.layers.Layer): pass\nL()",
    "activations": "keras.activations.relu([1.0])\nkeras.layers.Dense(1, activation=keras.activations.gelu)",
    "an activation by name": "from keras.activations import softmax",
    "mixed precision": "keras.mixed_precision.set_global_policy('mixed_float16')",
    "utilities": "keras.utils.set_random_seed(1)\nkeras.utils.to_categorical([0, 1])",
    "a schedule": "keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))",
    "its own loop": FIT + "import tensorflow as tf\no = keras.optimizers.SGD(0.1)\nm(x)\nwith tf.GradientTape() as t:\n"
    "    loss = tf.reduce_mean(m(x))\n"
    "o.apply_gradients(zip(t.gradient(loss, m.trainable_variables), m.trainable_variables))",
    "a train step": "class M(keras.Model):\n    def train_step(self, data): return {}\nM()",
    "losses and metrics": "keras.losses.MeanSquaredError()\nkeras.metrics.Mean()",
    "an old name of numpy": "import numpy as np\nassert not hasattr(keras, 'x') or np.float",
    "an older way in tf.keras": "import tensorflow as tf\nhasattr(tf.keras.layers, 'experimental')",
    "a legacy optimizer of tf.keras": "import npu_bridge, tensorflow as tf\nclass O(tf.keras.optimizers.legacy.SGD):\n"
    "    def _resource_apply_dense(self, grad, var, apply_state=None): pass\nO(0.1)",
    "an optimizer of TensorFlow 1": "import tensorflow as tf\nclass O(tf.compat.v1.train.Optimizer):\n"
    "    def _resource_apply_dense(self, grad, var): pass",
    "lr of its own": "import types\noptimizers = types.SimpleNamespace(make=dict)\noptimizers.make(lr=0.1)",
}
ONLY_OF_KERAS_3 = {
    "operators": "x = keras.ops.ones((2, 2))\nkeras.callbacks.EarlyStopping('loss')",
    "a new callback": "from keras.callbacks import SwapEMAWeights\nSwapEMAWeights()",
    "saving with ops": "keras.saving\nkeras.ops.matmul",
}
FORMS = [*OF_TODAY, *(pytest.param(each, marks=beside_keras3) for each in ONLY_OF_KERAS_3)]
OF_AN_OLDER = {
    "an inside": ("from keras.engine.base_layer import Layer", "keras.engine.base_layer.Layer"),
    "an inside of saving": ("keras.saving.hdf5_format", "keras.saving.hdf5_format"),
    "a layer": ("from keras.layers.core import Dropout", "keras.layers.core.Dropout"),
    "a keyword": ("keras.optimizers.SGD(lr=0.1)", "a keyword of keras.optimizers.SGD"),
    "the legacy method": (
        "class O(keras.optimizers.SGD):\n    def _resource_apply_dense(self, grad, var): pass",
        "an optimizer with _resource_apply_dense",
    ),
}
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def decides(folder, text: str) -> set[str]:
    return set(evidence_of(folder, f"import keras\n{text}").packages_needed_in_older_version)


@pytest.mark.parametrize("form", FORMS)
def test_a_name_that_both_have_decides_nothing(tmp_path, form):
    assert "keras" not in decides(tmp_path, {**OF_TODAY, **ONLY_OF_KERAS_3}[form])


@pytest.mark.parametrize("form", OF_AN_OLDER)
def test_a_name_that_only_an_older_one_has_decides(tmp_path, form):
    assert "keras" in decides(tmp_path, OF_AN_OLDER[form][0])


def test_examples_of_the_pages_see_what_is_installed(tmp_path):
    blocks = [block for page in (ROOT / "docs").glob("*.md") for block in _PYTHON.findall(page.read_text())]
    blocks = [block for block in blocks if "import keras" in block]
    assert blocks
    for block in blocks:
        assert not decides(tmp_path, block), block


@pytest.mark.slow("two starts of TensorFlow")
def test_what_is_switched_is_said_with_its_name_and_can_be_left(tmp_path):
    write_script(tmp_path, "import keras\nprint(type(keras).__name__)\nhasattr(keras, 'x')\nkeras.saving.hdf5_format\n")
    code, output = npu_run("train.py", cwd=tmp_path)
    meaning = "what it had then" if KERAS == "keras" else "Keras 2 (tf_keras)"
    assert (code, "ModuleProxy" in output) == (0, True), output
    assert "train.py:4: only an older Keras has keras.saving.hdf5_format, so keras" in output
    assert f"means {meaning}; --as-installed keeps the installed Keras" in output
    code, output = npu_run("--as-installed", "train.py", cwd=tmp_path)
    assert code == 1 and "ModuleProxy" not in output and "AttributeError" in output, output
    code, output = npu_run("check", "train.py", cwd=tmp_path)
    assert code == 0 and "only an older Keras has keras.saving.hdf5_format" in output
