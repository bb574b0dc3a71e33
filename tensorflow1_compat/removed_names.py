"""Names that Python, numpy and others had when TensorFlow 1.15 was new, and where they are found now.

Data only. They are healed for the user's files, and each is said once.
"""

from __future__ import annotations

import collections.abc

__all__ = ["GONE_MODULES", "GONE_NAMES", "WRAPPED"]

_OF_SCIPY_MISC = (
    "bytescale", "derivative", "fromimage", "imread", "imresize", "imrotate", "imsave", "imshow", "toimage",
)  # fmt: skip
_OF_TENSORBOARD = (
    "audio_pb", "custom_scalar", "custom_scalar_pb", "histogram_pb", "image_pb", "pr_curve", "pr_curve_pb",
    "pr_curve_raw_data_op", "pr_curve_raw_data_pb", "pr_curve_streaming_op", "scalar_pb", "text_pb",
)  # fmt: skip

# Used where the installed package no longer has the name.
GONE_NAMES: dict[str, str] = {
    **{
        f"collections.{name}": f"collections.abc:{name}"
        for name in collections.abc.__all__
        if name not in vars(collections)
    },
    **{f"numpy.{name}": f"builtins:{name}" for name in ("bool", "complex", "float", "int", "object", "str")},
    **{f"scipy.misc.{name}": f"tensorflow1_compat.scipy_misc:{name}" for name in _OF_SCIPY_MISC},
    **{f"tensorboard.summary.{name}": f"tensorboard.summary.v1:{name}" for name in _OF_TENSORBOARD},
    "PIL.Image.ANTIALIAS": "PIL.Image:LANCZOS",
    "PIL.Image.CUBIC": "PIL.Image:BICUBIC",
    "PIL.Image.LINEAR": "PIL.Image:BILINEAR",
    "base64.decodestring": "base64:decodebytes",
    "base64.encodestring": "base64:encodebytes",
    "cgi.escape": "html:escape",
    "fractions.gcd": "math:gcd",
    "inspect.getargspec": "tensorflow1_compat.shims:getargspec",
    "networkx.adj_matrix": "tensorflow1_compat.shims:adjacency_matrix",
    "networkx.from_numpy_matrix": "networkx:from_numpy_array",
    "networkx.from_scipy_sparse_matrix": "networkx:from_scipy_sparse_array",
    "networkx.to_numpy_matrix": "tensorflow1_compat.shims:to_numpy_matrix",
    "networkx.to_scipy_sparse_matrix": "tensorflow1_compat.shims:to_scipy_sparse_matrix",
    "numpy.asscalar": "tensorflow1_compat.shims:asscalar",
    "numpy.long": "builtins:int",
    "numpy.typeDict": "numpy:sctypeDict",
    "numpy.unicode": "builtins:str",
    "platform.linux_distribution": "tensorflow1_compat.shims:linux_distribution",
    "scipy.interp": "numpy:interp",
    "scipy.misc.comb": "scipy.special:comb",
    "scipy.misc.factorial": "scipy.special:factorial",
    "scipy.misc.logsumexp": "scipy.special:logsumexp",
    "scipy.ndimage.imread": "tensorflow1_compat.scipy_misc:imread",
    "skimage.measure.compare_mse": "skimage.metrics:mean_squared_error",
    "skimage.measure.compare_nrmse": "skimage.metrics:normalized_root_mse",
    "skimage.measure.compare_psnr": "skimage.metrics:peak_signal_noise_ratio",
    "skimage.measure.compare_ssim": "tensorflow1_compat.shims:structural_similarity",
    "time.clock": "time:perf_counter",
}

# Used where the installed package no longer has the module.
GONE_MODULES: dict[str, str] = {
    "scipy.misc": "tensorflow1_compat.scipy_misc",
    "scipy.sparse.linalg.eigen.arpack": "scipy.sparse.linalg",
    "sklearn.cross_validation": "sklearn.model_selection",
    "sklearn.externals.joblib": "joblib",
    "sklearn.externals.six": "six",
    "sklearn.grid_search": "sklearn.model_selection",
    "xml.etree.cElementTree": "xml.etree.ElementTree",
}

# Taken the place of always: what was accepted then is an error or something else now.
WRAPPED: dict[str, str] = {
    "absl.flags.DEFINE_enum": "tensorflow1_compat.shims:define_enum",
    "importlib.import_module": "tensorflow1_compat.imports:import_module",
    "json.load": "tensorflow1_compat.shims:json_load",
    "json.loads": "tensorflow1_compat.shims:json_loads",
    "matplotlib.use": "tensorflow1_compat.shims:matplotlib_use",
    "networkx.adjacency_matrix": "tensorflow1_compat.shims:adjacency_matrix",
    "networkx.laplacian_matrix": "tensorflow1_compat.shims:laplacian_matrix",
    "networkx.normalized_laplacian_matrix": "tensorflow1_compat.shims:normalized_laplacian_matrix",
    "numpy.array": "tensorflow1_compat.shims:array",
    "numpy.asarray": "tensorflow1_compat.shims:asarray",
    "numpy.loadtxt": "tensorflow1_compat.shims:loadtxt",
    "numpy.save": "tensorflow1_compat.shims:save",
    "numpy.savez": "tensorflow1_compat.shims:savez",
    "numpy.savez_compressed": "tensorflow1_compat.shims:savez_compressed",
    "random.sample": "tensorflow1_compat.shims:sample",
    "skimage.filters.gaussian": "tensorflow1_compat.shims:gaussian",
    "skimage.metrics.structural_similarity": "tensorflow1_compat.shims:structural_similarity",
    "skimage.transform.rescale": "tensorflow1_compat.shims:rescale",
    "tfdeterminism.patch": "tensorflow1_compat.shims:deterministic",
    "yaml.load": "tensorflow1_compat.shims:yaml_load",
    "yaml.load_all": "tensorflow1_compat.shims:yaml_load_all",
}
