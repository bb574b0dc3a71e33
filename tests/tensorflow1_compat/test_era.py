"""Telling scripts of TensorFlow 1 from those of TensorFlow 2 by their text."""

from __future__ import annotations

import sys
import types

import numpy
import pytest
import tensorflow as tf

from tensorflow1_compat.era import find_evidence_of_script
from tensorflow1_compat.eras import NAMESPACES, names_only_in
from tests.npu_run.launching import write_script

OF_1 = {
    "placeholder": "import tensorflow as tf\nx = tf.placeholder(tf.float32)",
    "contrib": "import tensorflow.contrib.slim as slim",
    "from": "from tensorflow import Session",
    "app": "import tensorflow as tf\nflags = tf.flags\nif __name__ == '__main__':\n    tf.app.run()",
    "examples": "def f():\n    from tensorflow.examples.tutorials.mnist import input_data",
    "compat": "import tensorflow.compat.v1 as tf\ntf.disable_v2_behavior()\nx = tf.placeholder(tf.float32)",
    "star": "from npu_bridge.npu_init import *\nconfig = tf.ConfigProto()",
    "by version": "import tensorflow as tf\nif tf.__version__ > '2':\n    tf = tf.compat.v1\nx = tf.get_variable('x')",
    "estimator": "import tensorflow as tf\ndef f(o):\n    return tf.train.AdamOptimizer().minimize(o)",
    "compat in full": "import tensorflow as tf\nx = tf.compat.v1.placeholder(tf.float32)\ny = tf.compat.v1.Session()",
    "beside addons": "import tensorflow as tf\nimport tensorflow_addons as tfa\nx = tf.placeholder(tf.float32)",
    "beside, without a graph": "import tensorflow as tf\ntf1 = tf.compat.v1\ntf1.get_variable('x', tf.zeros([1]))",
    "as many names of 2": "import tensorflow as tf\ntf.placeholder('float')\ntf.random.set_seed(1)",
    "its module": "from model import train\ntrain()",
    "relative": "import package.first",
    "by a text": "import importlib\nimportlib.import_module('package.third').x",
}
OF_2 = {
    "eager": "import tensorflow as tf\nprint(tf.constant(1) + 1)",
    "keras": "import tensorflow as tf\nm = tf.keras.Sequential()\nm.compile(tf.keras.optimizers.Adam())\nm.fit(x)",
    "no tensorflow": "import numpy as np\nprint(np.float)",
    "function": "import tensorflow as tf\n@tf.function\ndef f(x):\n    return tf.random.set_seed(1)",
    "compat of single names": "import tensorflow as tf\ntf.compat.v1.logging.set_verbosity('ERROR')",
    "compat in a graph": "import tensorflow as tf\ng = tf.Graph().as_default()\ntf.compat.v1.placeholder('float')",
    "beside, in a graph": "import tensorflow as tf\nv = tf.compat.v1\ng = tf.Graph().as_default()\nv.get_variable('x')",
    "switched off": "import tensorflow as tf\ntf.compat.v1.disable_eager_execution()\ntf.compat.v1.Session()",
    "npu_device": "import npu_device\nimport tensorflow as tf\nnpu_device.open().as_default()\ntf.placeholder",
    "npu_bridge": "import tensorflow as tf\nfrom npu_bridge.npu_init import npu_keras_optimizer\ntf.keras.Model()",
    "addons": "from npu_bridge.npu_init import *\nimport tensorflow_addons as tfa\ntf.get_variable('x', [1])",
    "broken": "print 'Python 2'",
}


@pytest.fixture
def folder(tmp_path):
    files = {
        "model.py": "import tensorflow as tf\ndef train():\n    return tf.Session()",
        "package/__init__.py": "",
        "package/first.py": "from .second import x\nfrom . import third",
        "package/second.py": "x = 1",
        "package/third.py": "import tensorflow as tf\nx = tf.layers.dense",
    }
    for name, text in files.items():
        write_script(tmp_path, text, name)
    return tmp_path


def evidence_of(folder, text, name="train.py"):
    """Writes a script into a folder; returns the evidence in its text."""
    script = write_script(folder, text, name)
    return find_evidence_of_script(str(script), [str(script.parent)])


@pytest.mark.parametrize("name", [*OF_1, *OF_2])
def test_scripts_are_told_apart(folder, name):
    assert evidence_of(folder, {**OF_1, **OF_2}[name]).is_tensorflow_1 == (name in OF_1)


def test_modules_above_a_script_that_adds_to_its_path_are_read(folder):
    text = "import os, sys\nsys.path.append(os.path.dirname(__file__) + '/..')\nfrom model import train\ntrain()"
    for said, is_tensorflow_1 in ((text, True), (text.replace("sys.path", "elsewhere"), False)):
        assert evidence_of(folder, said, "mains/run.py").is_tensorflow_1 is is_tensorflow_1


def test_the_first_use_is_named_with_its_line(tmp_path):
    use = evidence_of(tmp_path, OF_1["compat"]).of_1["tensorflow.compat.v1.placeholder"]
    script = str(tmp_path / "train.py")
    assert (use.place.file, use.place.line, use.call is not None, use.is_guarded) == (script, 3, True, False)


@pytest.mark.parametrize("era, there, not_there", [(1, tf.compat.v1, tf), (2, tf, tf.compat.v1)])
def test_names_of_one_era_are_those_that_tensorflow_has(era, there, not_there):
    def below(module: types.ModuleType, path: str):
        for part in path.split(".") if path else ():
            module = getattr(module, part, None)
        return module

    for path in NAMESPACES[era]:
        names = names_only_in(era, path)
        assert names, path
        assert not {name for name in names - {"contrib"} if not hasattr(below(there, path), name)}, path
        assert not {name for name in names if hasattr(below(not_there, path), name)}, path
    assert not names_only_in(era, "nowhere")


IS_NUMPY_2, IS_3_12 = int(numpy.__version__.partition(".")[0]) > 1, sys.version_info >= (3, 12)


@pytest.mark.parametrize(
    "line, name, is_gone",
    [
        (
            "from tensorflow.keras.optimizers import Adam\nAdam(0.1, decay=1e-6)",
            "tensorflow.keras.optimizers.Adam",
            True,
        ),
        ("import tensorflow as tf\ntf.keras.optimizers.SGD(lr=0.1)", "tensorflow.keras.optimizers.SGD", True),
        ("import tensorflow as tf\ntf.keras.optimizers.SGD(learning_rate=0.1)", "", False),
        ("import keras\nprint(keras.__version__)\nkeras.layers.Dense(1)", "", False),  # may be Keras 3
        ("import keras\nkeras.engine.base_layer.Layer()", "keras.engine.base_layer.Layer", True),
        ("from skimage import filters\nfilters.gaussian(x, multichannel=True)", "skimage.filters.gaussian", True),
        (
            "from google.protobuf import descriptor as d\nd.Descriptor(name='A')",
            "google.protobuf.descriptor.Descriptor",
            True,
        ),
        ("import numpy as np\nnp.float", "numpy.float", True),
        ("import numpy as np\nnp.bool", "numpy.bool", not IS_NUMPY_2),  # numpy 2 has its own
        ("import numpy as np\nnp.product([1])", "numpy.product", IS_NUMPY_2),
        ("import numpy as np\nnp.lib.pad", "numpy.lib.pad", IS_NUMPY_2),
        ("import numpy as np\nnp.lib.function_base.insert", "numpy.lib.function_base.insert", IS_NUMPY_2),
        ("import numpy as np\nnp.array(1, copy=False)", "numpy.array", IS_NUMPY_2),
        ("import numpy as np\nnp.array(1)", "numpy.array", False),
        ("import numpy as np\nnp.reshape(1, newshape=(1,))", "numpy.reshape", IS_NUMPY_2),
        ("import numpy as np\nnp.fromstring(b'1')", "numpy.fromstring", IS_NUMPY_2),
        ("x = f()\nx.tostring()", "an old.tostring", IS_NUMPY_2),
        ("x = f()\nx.isAlive()", "an old.isAlive", True),
        ("open('x', 'rU')", "an old.open", True),
        ("open('x', 'r')", "an old.open", False),
        ("import imp", "imp", IS_3_12),
        ("from distutils import version", "distutils.version", IS_3_12),
        (
            "import unittest\nclass T(unittest.TestCase):\n    def f(self): self.assertEquals()",
            "an old.assertEquals",
            IS_3_12,
        ),
        ("import tensorflow as tf\nclass T(tf.test.TestCase):\n    def f(self): self.assertItemsEqual()", "", False),
    ],
)
def test_what_an_older_package_or_python_had_is_noted_where_it_is_gone(tmp_path, line, name, is_gone):
    assert list(evidence_of(tmp_path, line).old_of_2) == [name] * is_gone
