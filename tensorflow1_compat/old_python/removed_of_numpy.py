"""Lists names that numpy 1.16 to 1.26 had, and their current places.

This module holds only data, for `removed_names.py`. Names that numpy 2 removed are listed separately, because they make
a script count as old only if numpy 2 is installed.
"""

from __future__ import annotations

__all__ = ["GONE_BEFORE_2", "GONE_MODULES", "GONE_SINCE_2", "KEYWORDS", "METHODS", "WRAPPED"]

_OLD = "tensorflow1_compat.old_python.old_numpy"
_RULES = "tensorflow1_compat.old_python.old_numpy_rules"


def _map_to_module(module: str, names: str) -> dict[str, str]:
    """Maps old names of numpy to the same names in another module."""
    return {f"numpy.{name}": f"{module}:{name}" for name in names.split()}


def _map_renamed_functions(pairs: str) -> dict[str, str]:
    """Maps old names of numpy to new names of numpy; `pairs` lists them as `old=new`."""
    split = (pair.split("=") for pair in pairs.split())
    return {f"numpy.{old}": f"numpy:{new}" for old, new in split}


GONE_BEFORE_2: dict[str, str] = {
    **_map_to_module("builtins", "bool complex float int object str"),
    **_map_to_module(_OLD, "alen asscalar mafromtxt ndfromtxt"),
    **_map_renamed_functions("bool8=bool_ bytes0=bytes_ int0=intp object0=object_ str0=str_ uint0=uintp void0=void"),
    **_map_renamed_functions("typeDict=sctypeDict"),
    "numpy.loads": "pickle:loads",
    "numpy.long": "builtins:int",
    "numpy.math": "math",
    "numpy.sys": "sys",
    "numpy.unicode": "builtins:str",
    "numpy.warnings": "warnings",
}
GONE_SINCE_2: dict[str, str] = {
    **_map_renamed_functions(
        "Inf=inf Infinity=inf NAN=nan NaN=nan PINF=inf infty=inf alltrue=all cfloat=complex128 clongfloat=clongdouble "
        "complex_=complex128 cumproduct=cumprod float_=float64 longcomplex=clongdouble longfloat=longdouble "
        "mat=asmatrix product=prod round_=round row_stack=vstack singlecomplex=complex64 sometrue=any string_=bytes_ "
        "trapz=trapezoid unicode_=str_"
    ),
    **_map_to_module(
        "numpy.exceptions",
        "AxisError ComplexWarning ModuleDeprecationWarning RankWarning TooHardError VisibleDeprecationWarning",
    ),
    **_map_to_module(
        _OLD,
        "ALLOW_THREADS BUFSIZE CLIP ERR_CALL ERR_DEFAULT ERR_IGNORE ERR_LOG ERR_PRINT ERR_RAISE ERR_WARN "
        "FLOATING_POINT_SUPPORT FPE_DIVIDEBYZERO FPE_INVALID FPE_OVERFLOW FPE_UNDERFLOW MAXDIMS MAY_SHARE_BOUNDS "
        "MAY_SHARE_EXACT NINF NZERO PZERO RAISE SHIFT_DIVIDEBYZERO SHIFT_INVALID SHIFT_OVERFLOW SHIFT_UNDERFLOW "
        "UFUNC_BUFSIZE_DEFAULT UFUNC_PYVALS_NAME WRAP asfarray cast deprecate deprecate_with_doc disp "
        "fastCopyAndTranspose find_common_type get_array_wrap geterrobj in1d issctype issubclass_ issubsctype "
        "kernel_version maximum_sctype msort nbytes numarray obj2sctype oldnumeric recfromcsv recfromtxt sctype2char "
        "sctypes seterrobj source tracemalloc_domain who",
    ),
    **_map_to_module("numpy.lib", "add_docstring add_newdoc"),
    **_map_to_module("numpy.lib.array_utils", "byte_bounds"),
    **_map_to_module("numpy.lib.npyio", "DataSource"),
    **_map_to_module("numpy.char", "chararray compare_chararrays"),
    **_map_to_module("numpy.rec", "format_parser"),
    "numpy.lib.format._read_array_header": "numpy.lib._format_impl:_read_array_header",
    "numpy.lib.stride_tricks._broadcast_shape": "numpy.lib._stride_tricks_impl:_broadcast_shape",
    "numpy.safe_eval": "ast:literal_eval",
}
_OF_LIB = (
    "arraypad", "arraysetops", "arrayterator", "function_base", "histograms", "index_tricks", "nanfunctions",
    "polynomial", "shape_base", "twodim_base", "type_check", "ufunclike", "utils",
)  # fmt: skip
# Old modules, and modules under old names.
GONE_MODULES: dict[str, str] = {
    "numpy.compat": "tensorflow1_compat.old_python.old_numpy_compat",
    "numpy.compat.py3k": "tensorflow1_compat.old_python.old_numpy_compat",
    "numpy.core._methods": "numpy._core._methods",
    "numpy.fft.fftpack": "numpy.fft",
    "numpy.fft.helper": "numpy.fft",
    **{f"numpy.lib.{name}": f"numpy.lib._{name}_impl" for name in _OF_LIB},
    "numpy.linalg.linalg": "numpy.linalg",
    "numpy.testing.decorators": "numpy.testing",
    "numpy.testing.utils": "numpy.testing",
}
# "module.Class.method" -> the current method, or "module:function", which gets the object first.
METHODS: dict[str, str] = {
    "numpy.generic.ptp": "numpy:ptp",
    "numpy.generic.tostring": "tobytes",
    "numpy.ndarray.itemset": f"{_OLD}:itemset",
    "numpy.ndarray.newbyteorder": f"{_OLD}:newbyteorder",
    "numpy.ndarray.ptp": "numpy:ptp",
    "numpy.ndarray.tostring": "tobytes",
}
# Keywords that numpy 2 removed, or that have a new meaning.
KEYWORDS: dict[str, frozenset[str]] = {
    "numpy.array": frozenset({"copy"}),
    "numpy.histogram": frozenset({"normed"}),
    "numpy.percentile": frozenset({"interpolation"}),
    "numpy.quantile": frozenset({"interpolation"}),
    "numpy.reshape": frozenset({"newshape"}),
}
# Functions that still exist, but refuse some arguments or return other results.
WRAPPED: dict[str, str] = {"numpy.core.umath_tests": "tensorflow1_compat.old_python.old_umath_tests"} | _map_to_module(
    _RULES,
    "append array array_split asanyarray asarray atleast_1d atleast_2d atleast_3d broadcast_arrays column_stack cross "
    "delete dstack fromstring full genfromtxt histogram hstack linspace loadtxt meshgrid nanpercentile nanquantile "
    "nonzero percentile quantile repeat reshape save savez savez_compressed shape split stack sum take unique "
    "vstack where",
)
