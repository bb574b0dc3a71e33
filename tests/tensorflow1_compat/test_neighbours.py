"""Installed packages work beside a script of TensorFlow 1 in one process, and see the installed TensorFlow."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import types

import numpy as np
import pytest
import scipy.sparse

from tensorflow1_compat import proxies
from tensorflow1_compat.old_python import scipy_misc, shims
from tests.npu_run.launching import finish, start, write_script

SCRIPT = """
import sys
import numpy as np
import tensorflow as tf
import matplotlib
matplotlib.use("Agg", warn=False)
import matplotlib.pyplot as plt
import tf_slim
if HAS_SKLEARN:
    import sklearn.linear_model
    from sklearn.externals import joblib
if HAS_ADDONS:
    import tensorflow_addons as tfa
import yaml, collections, time
from scipy.misc import imresize, toimage
from scipy.sparse.linalg.eigen.arpack import eigsh

real_tf, real_np = sys.modules["tensorflow"], sys.modules["numpy"]
assert real_tf.__version__.startswith("2.")
assert not hasattr(real_tf, "contrib") and not hasattr(real_tf, "placeholder")
assert tf.nn.gelu is real_tf.nn.gelu and not hasattr(tf, "optimizers")  # scripts of both use it, and tell by this
assert not hasattr(real_np, "int") and np.int is int and isinstance(np.zeros(2, np.float), np.ndarray)
for neighbour in (tfa, tf_slim) if HAS_ADDONS else (tf_slim,):
    for name, module in list(sys.modules.items()):
        if name.startswith(neighbour.__name__ + "."):
            for seen in (vars(module).get("tf"), vars(module).get("np")):
                assert seen is None or type(seen).__module__ != "tensorflow1_compat.proxies", name
assert not hasattr(sys.modules["time"], "clock") and time.clock() > 0
from absl import flags
flags.DEFINE_enum(name="implementation", default="keras", enum_values=("keras', 'graph_rewrite"), help="")
assert flags.FLAGS["implementation"].parser.enum_values == ["keras", "graph_rewrite"]
if HAS_TENSORBOARD:
    import tensorboard.summary
    assert callable(tensorboard.summary.image_pb) and "image_pb" not in vars(sys.modules["tensorboard.summary"])
assert not hasattr(sys.modules["collections"], "Iterable") and isinstance([], collections.Iterable)
assert yaml.load("a: [1, 2]") == {"a": [1, 2]}
np.save("rows.npy", ([[1, 2], [3]], 4))
assert list(np.load("rows.npy", allow_pickle=True)) == [[[1, 2], [3]], 4]
for save in (np.savez, np.savez_compressed):
    save("rows.npz", [4, [5]], params=[[1, 2], [3]], one=1)
    kept = np.load("rows.npz", allow_pickle=True)
    assert list(kept["arr_0"]) == [4, [5]] and list(kept["params"]) == [[1, 2], [3]] and kept["one"] == 1
with open("rows.dat", "w") as file:
    file.write("1::2::3.5\\n# of rows\\n4::5::6 # the last\\n")
assert np.loadtxt("rows.dat", delimiter="::").tolist() == [[1, 2, 3.5], [4, 5, 6]]
assert np.loadtxt("rows.dat", float, "#", b"::", usecols=[2], unpack=True).tolist() == [3.5, 6]
assert np.loadtxt([b"1::2"], delimiter="::", converters={0: lambda text: float(text) * 10}).tolist() == [10, 2]
assert np.loadtxt(["1,2", "3,4"], delimiter=",").tolist() == [[1, 2], [3, 4]]
assert eigsh(np.eye(4), 2)[0].shape == (2,)
picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
assert imresize(picture, (8, 2)).shape == (8, 2, 3) and imresize(picture, 50).shape == (2, 2, 3)
assert imresize(picture, 2.0, interp="nearest").shape == (8, 8, 3)
assert toimage(np.array([[0.0, 0.5], [1.0, 0.25]])).getpixel((1, 0)) == 128

figure, axis = plt.subplots()
axis.plot([1, 2], [3, 4])
figure.savefig("figure.png")
if HAS_SKLEARN:
    model = sklearn.linear_model.LinearRegression().fit(np.arange(6).reshape(3, 2), [1.0, 2.0, 3.0])
    joblib.dump(model, "model.joblib")
    assert abs(joblib.load("model.joblib").predict([[6, 7]])[0] - 4.0) < 1e-6

x = tf.placeholder(tf.float32, [None, 4])
hidden = tf_slim.fully_connected(x, 3, scope="fc")
if HAS_ADDONS:
    crf, _ = tfa.text.crf_log_likelihood(tf.reshape(hidden, [1, -1, 3]), [[0, 1]], [2], tf.ones([3, 3]))
else:
    crf = tf.reduce_sum(hidden, keepdims=True)[0]
keras_model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(4,))])
keras_model.compile(tf.keras.optimizers.SGD(0.1), "mse")
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    print("crf", session.run(crf, {x: np.ones((2, 4), np.float32)}).shape)
tf.keras.backend.clear_session()
keras_model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(4,))])
keras_model.compile(tf.keras.optimizers.SGD(0.1), "mse")
history = keras_model.fit(np.ones((8, 4)), np.zeros((8, 2)), epochs=3, verbose=0).history["loss"]
assert history[-1] < history[0]
print("fine")
"""


@pytest.mark.slow("loads every neighbour of TensorFlow")
def test_neighbours_work_and_frictions_are_healed_for_the_script_alone(tmp_path):
    # Beside the later TensorFlow, addons are not to be had.
    packages = {"ADDONS": "tensorflow_addons", "SKLEARN": "sklearn", "TENSORBOARD": "tensorboard"}
    script = SCRIPT
    for word, package in packages.items():
        script = script.replace(f"HAS_{word}", str(importlib.util.find_spec(package) is not None))
    write_script(tmp_path, script)
    code, output = finish(start("train.py", cwd=tmp_path, TF_CPP_MIN_LOG_LEVEL="2"), limit_secs=240)
    assert code == 0 and "fine" in output and "crf (1,)" in output
    for friction in ("numpy.int", "numpy.float", "time.clock", "collections.Iterable", "yaml.load without Loader"):
        lines = [
            line for line in output.splitlines() if line.startswith("npu-run: train.py:") and f" {friction}:" in line
        ]
        assert len(lines) == 1, friction


def test_a_patch_for_determinism_refuses_no_version(monkeypatch):
    package = types.ModuleType("tfdeterminism")
    package.patch = lambda: pytest.fail("No patch available for version 2.15.1 of TensorFlow")
    monkeypatch.setitem(sys.modules, "tfdeterminism", package)
    monkeypatch.setenv("TF_CUDNN_DETERMINISTIC", "0")
    proxies.proxy("tfdeterminism").value_of_import("patch")()
    assert os.environ["TF_CUDNN_DETERMINISTIC"] == "1" and not proxies.is_plain("tfdeterminism")


def test_colours_are_those_of_the_mode_that_an_image_is_made_with():
    pytest.importorskip("PIL")
    grey, ink = np.tile(np.uint8([100, 128, 128]), (2, 5, 1)), np.tile(np.uint8([0, 255, 255, 0]), (2, 5, 1))
    for image, colour in (
        (scipy_misc.toimage(grey, mode="YCbCr").convert("RGB"), (100, 100, 100)),
        (scipy_misc.toimage(ink, mode="CMYK").convert("RGB"), (255, 0, 0)),
        (scipy_misc.toimage(np.moveaxis(ink, 2, 0)), (0, 255, 255, 0)),
        (scipy_misc.toimage([[0.0, 2.0]], mode="I", high=3000), 0),
        (scipy_misc.toimage([[2.0, 0.0]], mode="I", high=3000), 3000),
        (scipy_misc.toimage(np.array([[0, 30000, -30000]], np.int16), mode="I", high=4000), 2000),
    ):
        assert image.getpixel((0, 0)) == colour
    assert scipy_misc.imresize(grey, 200, mode="YCbCr")[3, 9].tolist() == [100, 128, 128]


def test_graphs_become_matrices_as_before_networkx_3():
    networkx = pytest.importorskip("networkx")
    graph = networkx.from_edgelist([(0, 1), (1, 2)])
    for make in (shims.adjacency_matrix, shims.to_scipy_sparse_matrix, shims.laplacian_matrix):
        matrix = make(graph)
        assert isinstance(matrix, scipy.sparse.spmatrix) and matrix.sum(axis=0).shape == (1, 3)
    assert (shims.adjacency_matrix(graph).toarray() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]).all()


def test_channels_of_pictures_as_before_scikit_image_0_21(monkeypatch):
    for name in ("skimage", "skimage.filters"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    new = sys.modules["skimage.filters"]
    new.gaussian = lambda image, sigma=1, channel_axis=None: (sigma, channel_axis)
    blur = shims._wrap_to_accept_multichannel("skimage.filters", "gaussian")
    assert blur(0, 2, multichannel=True) == (2, -1) and blur(0, channel_axis=0) == (1, 0)
    assert blur(0, multichannel=False) == blur(0) == (1, None)


COMPILED = """
#include <Python.h>

static PyObject *of_numpy(PyObject *module, const char *name) {
    PyObject *numpy = PyObject_GetAttrString(module, "np");
    return numpy ? PyObject_GetAttrString(numpy, name) : NULL;
}
static PyObject *late(PyObject *module, PyObject *unused) { return of_numpy(module, "int"); }
static PyMethodDef methods[] = {{"late", late, METH_NOARGS, ""}, {NULL}};
static int load(PyObject *module) {
    if (PyModule_AddObject(module, "np", PyImport_ImportModule("numpy"))) return -1;
    return PyModule_AddObject(module, "DTYPE", of_numpy(module, "float"));
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, load}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "bbox", "", 0, methods, slots};
PyMODINIT_FUNC PyInit_bbox(void) { return PyModuleDef_Init(&definition); }
"""


@pytest.mark.slow("compiles a module")
def test_compiled_modules_of_the_script_find_old_names_of_numpy(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("no compiler")
    (tmp_path / "bbox.c").write_text(COMPILED)
    name, include = "bbox" + sysconfig.get_config_var("EXT_SUFFIX"), sysconfig.get_path("include")
    subprocess.run(["gcc", "-shared", "-fPIC", f"-I{include}", "bbox.c", "-o", name], cwd=tmp_path, check=True)
    script = """
    import sys
    import tensorflow as tf
    import bbox
    assert not hasattr(sys.modules["numpy"], "float") and tf.placeholder
    print("HAS", bbox.DTYPE, bbox.late())
    """
    write_script(tmp_path, script)
    code, output = finish(start("train.py", cwd=tmp_path))
    assert code == 0, output
    assert "HAS <class 'float'> <class 'int'>" in output
