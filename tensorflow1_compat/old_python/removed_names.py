"""Lists names that Python, numpy and other packages had in 2019, and their current places.

This module holds only data. The user's files get these names; the first use of each name is printed. Names of numpy are
in `removed_of_numpy.py`.
"""

from __future__ import annotations

import collections.abc
import sys
from collections.abc import Iterable

from tensorflow1_compat.old_python import removed_of_numpy

__all__ = [
    "GONE_METHODS", "GONE_MODULES", "GONE_NAMES", "OF_OLD", "OLD_ANYWHERE", "OLD_BESIDE_NUMPY_2", "REUSED", "UP",
    "WRAPPED",
]  # fmt: skip

_SHIMS, _PYTHON = "tensorflow1_compat.old_python.shims", "tensorflow1_compat.old_python.python_names"

_OF_SCIPY_MISC = (
    "bytescale", "derivative", "fromimage", "imread", "imresize", "imrotate", "imsave", "imshow", "toimage",
)  # fmt: skip
_OF_TENSORBOARD = (
    "audio_pb", "custom_scalar", "custom_scalar_pb", "histogram_pb", "image_pb", "pr_curve", "pr_curve_pb",
    "pr_curve_raw_data_op", "pr_curve_raw_data_pb", "pr_curve_streaming_op", "scalar_pb", "text_pb",
)  # fmt: skip

# Used if the installed package lacks the name.
GONE_NAMES: dict[str, str] = {
    **{
        f"collections.{name}": f"collections.abc:{name}"
        for name in collections.abc.__all__
        if name not in vars(collections)
    },
    **removed_of_numpy.GONE_BEFORE_2,
    **removed_of_numpy.GONE_SINCE_2,
    **{f"scipy.misc.{name}": f"tensorflow1_compat.old_python.scipy_misc:{name}" for name in _OF_SCIPY_MISC},
    **{f"tensorboard.summary.{name}": f"tensorboard.summary.v1:{name}" for name in _OF_TENSORBOARD},
    "PIL.Image.ANTIALIAS": "PIL.Image:LANCZOS",
    "PIL.Image.CUBIC": "PIL.Image:BICUBIC",
    "PIL.Image.LINEAR": "PIL.Image:BILINEAR",
    "base64.decodestring": "base64:decodebytes",
    "base64.encodestring": "base64:encodebytes",
    "asyncio.coroutine": "types:coroutine",
    "cgi.escape": "tensorflow1_compat.old_python.old_cgi:escape",
    "fractions.gcd": f"{_PYTHON}:gcd",
    "inspect.getargspec": f"{_SHIMS}:getargspec",
    "networkx.adj_matrix": f"{_SHIMS}:adjacency_matrix",
    "networkx.from_numpy_matrix": "networkx:from_numpy_array",
    "networkx.from_scipy_sparse_matrix": "networkx:from_scipy_sparse_array",
    "networkx.to_numpy_matrix": f"{_SHIMS}:to_numpy_matrix",
    "networkx.to_scipy_sparse_matrix": f"{_SHIMS}:to_scipy_sparse_matrix",
    "os.errno": "errno",
    "platform.dist": f"{_PYTHON}:dist",
    "platform.linux_distribution": f"{_SHIMS}:linux_distribution",
    "scipy.interp": "numpy:interp",
    "scipy.misc.comb": "scipy.special:comb",
    "scipy.misc.factorial": "scipy.special:factorial",
    "scipy.misc.logsumexp": "scipy.special:logsumexp",
    "scipy.ndimage.imread": "tensorflow1_compat.old_python.scipy_misc:imread",
    "skimage.measure.compare_mse": "skimage.metrics:mean_squared_error",
    "skimage.measure.compare_nrmse": "skimage.metrics:normalized_root_mse",
    "skimage.measure.compare_psnr": "skimage.metrics:peak_signal_noise_ratio",
    "skimage.measure.compare_ssim": f"{_SHIMS}:structural_similarity",
    "time.clock": "time:perf_counter",
}
# Names by the version of Python that removed them.
_SINCE: dict[tuple[int, int], dict[str, str]] = {
    (3, 12): {
        "configparser.SafeConfigParser": "configparser:ConfigParser",
        "importlib.find_loader": f"{_PYTHON}:find_loader",
        "locale.format": f"{_PYTHON}:format_number",
    },
    (3, 13): {
        "locale.resetlocale": f"{_PYTHON}:resetlocale",
        "logging._acquireLock": "logging:_lock.acquire",
        "logging._releaseLock": "logging:_lock.release",
        "unittest.findTestCases": f"{_PYTHON}:find_test_cases",
        "unittest.getTestCaseNames": f"{_PYTHON}:get_test_case_names",
        "unittest.makeSuite": f"{_PYTHON}:make_suite",
    },
    (3, 14): {
        "pkgutil.find_loader": f"{_PYTHON}:find_loader",
        "pkgutil.get_loader": f"{_PYTHON}:get_loader",
    },
}
for _version, _names in _SINCE.items():
    if sys.version_info >= _version:
        GONE_NAMES.update(_names)

# Used if the installed package lacks the module.
GONE_MODULES: dict[str, str] = {
    "scipy.misc": "tensorflow1_compat.old_python.scipy_misc",
    "scipy.sparse.linalg.eigen.arpack": "scipy.sparse.linalg",
    "sklearn.cross_validation": "sklearn.model_selection",
    "sklearn.externals.joblib": "joblib",
    "sklearn.externals.six": "six",
    "sklearn.grid_search": "sklearn.model_selection",
    "xml.etree.cElementTree": "xml.etree.ElementTree",
    **removed_of_numpy.GONE_MODULES,
}
_MODULES_SINCE: dict[tuple[int, int], dict[str, str]] = {
    (3, 12): {"distutils": "setuptools._distutils"},
    (3, 13): {
        "cgi": "tensorflow1_compat.old_python.old_cgi",
        "imghdr": "tensorflow1_compat.old_python.old_imghdr",
        "pipes": "shlex",
    },
}
for _version, _names in _MODULES_SINCE.items():
    if sys.version_info >= _version:
        GONE_MODULES.update(_names)
# A module that lacks a name -> the module that has the name: numpy 1 had all of its names in both.
UP: dict[str, str] = {"numpy.core": "numpy", "numpy.lib": "numpy", "numpy.matlib": "numpy"}

# Removed methods: "module.Class.method" -> the current method, or "module:function", which gets the object first.
_ASSERTIONS = {
    "assertAlmostEquals": "assertAlmostEqual", "assertEquals": "assertEqual",
    "assertNotAlmostEquals": "assertNotAlmostEqual", "assertNotEquals": "assertNotEqual",
    "assertNotRegexpMatches": "assertNotRegex", "assertRaisesRegexp": "assertRaisesRegex",
    "assertRegexpMatches": "assertRegex", "assert_": "assertTrue", "failIf": "assertFalse",
    "failIfAlmostEqual": "assertNotAlmostEqual", "failIfEqual": "assertNotEqual", "failUnless": "assertTrue",
    "failUnlessAlmostEqual": "assertAlmostEqual", "failUnlessEqual": "assertEqual", "failUnlessRaises": "assertRaises",
    "assertDictContainsSubset": f"{_PYTHON}:assert_dict_contains_subset",
}  # fmt: skip
_METHODS_SINCE_3_12 = {
    **{f"unittest.case.TestCase.{old}": new for old, new in _ASSERTIONS.items()},
    "configparser.RawConfigParser.readfp": f"{_PYTHON}:read_fp",
}
GONE_METHODS: dict[str, str] = {
    **removed_of_numpy.METHODS,
    **(_METHODS_SINCE_3_12 if sys.version_info >= (3, 12) else {}),
    "array.array.fromstring": "frombytes",
    "array.array.tostring": "tobytes",
    "html.parser.HTMLParser.unescape": f"{_PYTHON}:unescape",
    "threading.Thread.isAlive": "is_alive",
    "xml.etree.ElementTree.Element.getchildren": f"{_PYTHON}:children_of",
    "xml.etree.ElementTree.Element.getiterator": f"{_PYTHON}:elements_of",
    "unittest.case.TestCase.assertItemsEqual": f"{_PYTHON}:assert_count_equal",  # TensorFlow's own tests still have it
    "xml.etree.ElementTree.ElementTree.getiterator": f"{_PYTHON}:elements_of",
}

# Names with a new meaning: scripts of TensorFlow 1 still get the replacement in `GONE_NAMES`.
REUSED = frozenset({"numpy.bool", "numpy.long"})

# Names that reveal an old script, as `reading.py` writes them; some only count with numpy 2.
OF_OLD = "an old"  # comes before a method, and before a mode of `open`


def _remark_keys_of_methods(methods: Iterable[str]) -> frozenset[str]:
    return frozenset(f"{OF_OLD}.{name.rpartition('.')[2]}" for name in methods) - {f"{OF_OLD}.assertItemsEqual"}


OLD_BESIDE_NUMPY_2 = _remark_keys_of_methods(removed_of_numpy.METHODS).union(
    removed_of_numpy.GONE_SINCE_2, removed_of_numpy.GONE_MODULES, ("numpy.fromstring", "numpy.lib.pad")
)
_OTHERS = (f"{OF_OLD}.open", "numpy.core.umath_tests", *(("imp",) if sys.version_info >= (3, 12) else ()))
OLD_ANYWHERE = _remark_keys_of_methods(GONE_METHODS).union(GONE_NAMES, GONE_MODULES, _OTHERS) - OLD_BESIDE_NUMPY_2

# Wrappers that always replace the real functions, which now refuse some arguments or interpret them differently.
WRAPPED: dict[str, str] = {
    "absl.flags.DEFINE_enum": f"{_SHIMS}:define_enum",
    "importlib.import_module": "tensorflow1_compat.imports:import_module",
    "json.load": f"{_SHIMS}:json_load",
    "json.loads": f"{_SHIMS}:json_loads",
    "matplotlib.use": f"{_SHIMS}:matplotlib_use",
    "networkx.adjacency_matrix": f"{_SHIMS}:adjacency_matrix",
    "networkx.laplacian_matrix": f"{_SHIMS}:laplacian_matrix",
    "networkx.normalized_laplacian_matrix": f"{_SHIMS}:normalized_laplacian_matrix",
    "imp": "tensorflow1_compat.old_python.old_imp",  # loads the user's files as imports do
    "math.factorial": f"{_PYTHON}:factorial",
    **{f"random.{name}": f"{_PYTHON}:{name}" for name in ("randint", "randrange", "seed", "shuffle")},
    "random.sample": f"{_SHIMS}:sample",
    "skimage.filters.gaussian": f"{_SHIMS}:gaussian",
    "skimage.metrics.structural_similarity": f"{_SHIMS}:structural_similarity",
    "skimage.transform.rescale": f"{_SHIMS}:rescale",
    "tfdeterminism.patch": f"{_SHIMS}:deterministic",
    "yaml.load": f"{_SHIMS}:yaml_load",
    "yaml.load_all": f"{_SHIMS}:yaml_load_all",
    **removed_of_numpy.WRAPPED,
}
