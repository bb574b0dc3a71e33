"""The names that imports bind in the files of a script of TensorFlow 1, in every form of an import."""

from __future__ import annotations

import json

import pytest
import tensorflow

from tests.npu_run.launching import ROOT, npu_run, write_script

SCRIPT = """
import json, sys, types
facts = {}
import tensorflow
facts["import tensorflow"] = tensorflow.__version__
import gc
facts["gc"] = [gc.isenabled(), gc.get_freeze_count() > 100000]
import tensorflow as tf
facts["as tf"] = tf is tensorflow and isinstance(tf, types.ModuleType)
import tensorflow.compat.v1 as v1, os
facts["compat.v1"] = v1.__version__ == "1.15.0" and v1.placeholder is tf.placeholder and os.sep == "/"
from tensorflow.compat import v1 as other_v1
facts["from compat"] = other_v1 is v1 and tf.compat.v1 is v1
from tensorflow import placeholder, train as trainers
facts["from tensorflow"] = placeholder is tf.placeholder and trainers.AdamOptimizer is tf.train.AdamOptimizer
from tensorflow.python.framework import ops
facts["tensorflow.python"] = ops.get_default_graph() is tf.get_default_graph()
import tensorflow.python.ops.math_ops as math_ops
facts["deep as"] = math_ops.add_n is tf.add_n
from tensorflow.core.protobuf import config_pb2
facts["core"] = config_pb2.ConfigProto is tf.ConfigProto
from tensorflow_core.python.framework import ops as inner_ops
import tensorflow_core.contrib.slim as inner_slim
facts["tensorflow_core"] = inner_ops is ops and inner_slim is tf.contrib.slim
import keras
from tensorflow import keras as tf_keras
from tensorflow.keras.layers import Dense
facts["keras"] = [keras.__version__, tf_keras.__version__, keras.layers.Dense is Dense, Dense is tf.keras.layers.Dense]
from npu_bridge.npu_init import *
facts["npu_init"] = tf is tensorflow and tf.__version__ == "1.15.0" and "NPUOptimizer" in globals()
import npu_bridge.npu_init as npu_init
facts["npu_init as"] = npu_init.tf is tensorflow
if True:
    from tensorflow.contrib import framework
    import tensorflow.contrib.framework
facts["contrib"] = framework is tensorflow.contrib.framework and tf.contrib.framework is framework
import importlib
facts["import_module"] = importlib.import_module("tensorflow") is tf
facts["__import__"] = __import__("tensorflow") is tf and __import__("tensorflow.compat.v1", fromlist=["x"]) is v1
def late():
    import tensorflow as tf
    import tensorflow.nn as nn
    from tensorflow import losses
    return tf.__version__, nn.relu is tf.nn.relu, losses.sparse_softmax_cross_entropy is not None
facts["late"] = late()
def converted(value):
    from tensorflow.contrib import framework
    if value > 0:
        value = tf.cast(framework.get_name_scope() == "", tf.int32) + value
    return value
facts["autograph"] = tf.Session().run(tf.autograph.to_graph(converted)(tf.constant(1))) in (1, 2)
class Holder:
    import tensorflow as inside
    from tensorflow import Session as _session
    __hidden = 1
facts["in a class"] = Holder.inside is tf and Holder._session is tf.Session
from package import relative
from package.deeper import module as deep
facts["relative"] = relative.FACTS
facts["deeper"] = deep.FACTS
import folderless.one
facts["namespace package"] = folderless.one.tf is tf
import appended
facts["real elsewhere"] = appended.VERSION
facts["flags"] = tf.app.flags is tf.flags or tf.app.flags.FLAGS is tf.flags.FLAGS
import logging
facts["level"] = logging.getLogger("tensorflow").level
facts["eager"] = tf.executing_eagerly()
os.environ["TF_DETERMINISTIC_OPS"] = "1"
facts["drawn"] = tf.Session().run(tf.random_uniform([2])).size
facts["isinstance"] = isinstance(tf.placeholder(tf.float32), tf.Tensor)
facts["variable"] = isinstance(tf.get_variable("v", [2]), tf.Variable)
facts["dimension"] = tf.placeholder(tf.float32, [None, 3]).shape[1].value
facts["real"] = sys.modules["tensorflow"].__version__
facts["__file__"] = [tf.__file__.endswith("__init__.py"), __name__, __spec__ is None]

missing = {}
def tell(name, function):
    try: function()
    except Exception as error: missing[name] = [type(error).__name__, str(error)]
tell("attribute", lambda: tf.contrib.framework.nonsense)
def from_import():
    from tensorflow.train import AdamOptimiser
tell("from", from_import)
def module():
    import tensorflow.contrib.nonsense
tell("module", module)
def star():
    importlib.import_module("tensorflow.nonsense")
tell("import_module", star)
facts["hasattr"] = hasattr(tf, "nonsense") or hasattr(tf.nn, "nonsense")
try:
    from tensorflow.contrib import nonsense
except ImportError:
    facts["except"] = True
facts["missing"] = missing
print("FACTS", json.dumps(facts))
"""
RELATIVE = """
from . import sibling
from .sibling import tf
import package
import tensorflow.compat.v1 as v1
FACTS = [tf.__version__, v1.__version__, sibling.where()]
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    write_script(folder, SCRIPT)
    write_script(folder / "package", "", "__init__.py")
    write_script(folder / "package", RELATIVE, "relative.py")
    write_script(
        folder / "package",
        "import tensorflow as tf\ndef where():\n    import keras\n    return keras.__version__\n",
        "sibling.py",
    )
    write_script(folder / "package/deeper", "", "__init__.py")
    write_script(folder / "package/deeper", "from ..sibling import *\nFACTS = tf.__version__\n", "module.py")
    write_script(folder / "folderless", "import tensorflow as tf\n", "one.py")
    installed = tmp_path_factory.mktemp("installed")
    write_script(installed, "import tensorflow as tf\nVERSION = tf.__version__[:2]\n", "appended.py")
    code, output = npu_run("train.py", cwd=folder, PYTHONPATH=f"{ROOT}:{installed}")
    assert code == 0
    return json.loads(output.split("FACTS ")[1].splitlines()[0])


FORMS = (
    *("as tf", "compat.v1", "tensorflow_core", "from compat", "from tensorflow", "tensorflow.python", "deep as"),
    *("core", "npu_init", "npu_init as", "contrib", "import_module", "__import__", "autograph", "in a class"),
    *("namespace package", "flags", "except"),
)


@pytest.mark.parametrize("form", FORMS)
def test_form_binds_tensorflow_1(facts, form):
    assert facts[form] is True


def test_versions_are_those_of_1_15(facts):
    assert facts["import tensorflow"] == "1.15.0"
    assert facts["keras"] == ["2.3.1", "2.2.4-tf", True, True]
    assert facts["late"] == ["1.15.0", True, True]
    assert facts["relative"] == ["1.15.0", "1.15.0", "2.3.1"]
    assert facts["deeper"] == "1.15.0"


def test_garbage_collection_leaves_out_what_tensorflow_has_made(facts):
    assert facts["gc"] == [True, True]


def test_others_see_the_installed_tensorflow(facts):
    assert facts["real elsewhere"] == "2."
    assert facts["real"] == tensorflow.__version__


def test_version_2_is_off(facts):
    assert facts["eager"] is False
    assert facts["drawn"] == 2  # 1.15 does not know the variable that refuses random operators without a seed
    assert facts["dimension"] == 3
    assert facts["level"] == 0  # of its own, so that the root's counts
    assert facts["isinstance"] is facts["variable"] is True
    assert facts["__file__"] == [True, "__main__", True]


def test_a_missing_name_is_one_line_with_file_and_line_and_the_nearest(facts):
    missing = facts["missing"]
    assert facts["hasattr"] is False
    assert {name: kind for name, (kind, _) in missing.items()} == {
        "attribute": "AttributeError",
        "from": "ImportError",
        "module": "ModuleNotFoundError",
        "import_module": "ModuleNotFoundError",
    }
    for _, text in missing.values():
        assert "\n" not in text and text.startswith("train.py:") and "issue" in text
    assert "tf.train.AdamOptimizer" in missing["from"][1] and "tf.train.AdamOptimiser" in missing["from"][1]
    assert "tf.contrib.framework.nonsense" in missing["attribute"][1]


def test_a_folder_of_the_same_name_beside_the_script_is_the_users(tmp_path):
    write_script(tmp_path, "import keras, yaml\nfrom keras import mine\nprint(keras.WHOSE, mine, yaml.load())\n")
    write_script(tmp_path / "keras", "WHOSE = 'ours'\nmine = 1\n", "__init__.py")
    write_script(tmp_path, "def load():\n    return 'ours, too'\n", "yaml.py")
    code, output = npu_run("--tf1", "train.py", cwd=tmp_path)
    assert (code, output) == (0, "ours 1 ours, too\n")


@pytest.mark.slow("several starts")
def test_the_project_around_the_script_sees_tensorflow_1_through_pythonpath(tmp_path):
    script = "import models.net, other\nprint('SEES', models.net.tf.__version__, other.tf.__version__[:2])\n"
    write_script(tmp_path / "tools", "import tensorflow as tf\ntf.placeholder\n" + script)
    write_script(tmp_path / "models", "import tensorflow as tf\n", "net.py")
    write_script(tmp_path / "site-packages", "import tensorflow as tf\n", "other.py")
    paths = f"{ROOT}:{tmp_path / 'site-packages'}:{tmp_path}"
    code, output = npu_run("tools/train.py", cwd=tmp_path, PYTHONPATH=paths)
    assert code == 0, output
    assert "SEES 1.15.0 2." in output
