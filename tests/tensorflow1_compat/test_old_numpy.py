"""A file loaded as the user's gets the results of numpy 1.16 to 1.26, under numpy 1.26 and under numpy 2."""

from __future__ import annotations

import math
import pickle

import numpy
import pytest

from tensorflow1_compat.old_python import old_numpy, removed_of_numpy
from tensorflow1_compat.old_python.calls import numpy_version
from tensorflow1_compat.source import compile_source
from tests.tensorflow1_compat.old_scripts import answer_of

# Code of a script -> its old result, with arrays as lists and types by their names.
NAMES = {
    "np.Inf": math.inf,
    "np.Infinity": math.inf,
    "np.PINF": math.inf,
    "np.infty": math.inf,
    "np.NINF": -math.inf,
    "[np.isnan(np.NaN), np.isnan(np.NAN)]": [True, True],
    "[np.copysign(1, np.NZERO), np.copysign(1, np.PZERO)]": [-1.0, 1.0],
    "[np.bool, np.complex, np.float, np.int, np.object, np.str]": ["bool", "complex", "float", "int", "object", "str"],
    "[np.long, np.unicode]": ["int", "str"],
    "[isinstance(True, np.bool), isinstance(3, np.long), np.zeros(1, np.bool).dtype]": [True, True, "bool"],
    "[np.bool8 is np.bool_, np.bytes0 is np.bytes_, np.int0 is np.intp, np.object0 is np.object_]": [True] * 4,
    "[np.str0 is np.str_, np.uint0 is np.uintp, np.void0 is np.void]": [True] * 3,
    "[np.float_, np.string_, np.unicode_, np.complex_]": ["float64", "bytes_", "str_", "complex128"],
    "[np.cfloat, np.singlecomplex, np.dtype(np.longfloat).char, np.dtype(np.clongfloat).char]": [
        "complex128", "complex64", "g", "G",
    ],
    "np.dtype(np.longcomplex).char": "G",
    "[np.typeDict['float32'], np.typeDict['int8']]": ["float32", "int8"],
    "np.alen([[1, 2], [3, 4], [5, 6]])": 3,
    "np.alen(7)": 1,
    "np.asscalar(np.array([24]))": 24,
    "np.asfarray([2, 3])": [2.0, 3.0],
    "[np.asfarray([2], np.float32).dtype, np.asfarray([2], np.int8).dtype]": ["float32", "float64"],
    "np.alltrue([1, 0])": False,
    "np.sometrue([1, 0])": True,
    "np.product([2, 3])": 6,
    "np.product([[2, 3], [4, 5]], axis=0)": [8, 15],
    "np.cumproduct([2, 3, 4])": [2, 6, 24],
    "np.round_(2.567, 1)": 2.6,
    "np.row_stack([[1, 2], [3, 4]])": [[1, 2], [3, 4]],
    "np.trapz([1, 2, 3], [4, 6, 8])": 8.0,
    "np.in1d([[0, 1], [2, 5]], [2, 0])": [True, False, True, False],
    "np.in1d([0, 1, 2], [2, 0], invert=True)": [False, True, False],
    "np.msort([[3, 2], [1, 4]])": [[1, 2], [3, 4]],
    "np.fastCopyAndTranspose([[1, 2], [3, 4]])": [[1, 3], [2, 4]],
    "np.mat('1 2; 3 4') * np.mat('1; 1')": [[3], [7]],
    "type(np.mat([1]))": "matrix",
    "[np.cast['f']([1.5]).dtype, np.cast[np.uint8](3.7)]": ["float32", 3],
    "[np.nbytes['d'], np.nbytes[np.int16], np.nbytes['c8']]": [8, 2, 8],
    "np.sctypes['float'][:3]": ["float16", "float32", "float64"],
    "[np.sctypes['int'][0], np.sctypes['uint'][3], np.sctypes['complex'][1], np.sctypes['others'][0]]": [
        "int8", "uint64", "complex128", "bool",
    ],
    "np.find_common_type([], [np.int64, np.float32, complex])": "complex128",
    "np.find_common_type([np.float32], [np.int64, np.float64])": "float32",
    "np.find_common_type([np.int64], [np.float32])": "float64",
    "np.find_common_type([np.int8, np.uint16], [])": "int32",
    "[np.obj2sctype(np.array([1.0])), np.obj2sctype('i4'), np.obj2sctype(5, 0)]": ["float64", "int32", 0],
    "[np.issctype(np.int32), np.issctype(list), np.issctype(1.1), np.issctype('S1')]": [True, False, False, False],
    "[np.issubclass_(np.int32, int), np.issubclass_(np.float64, float), np.issubclass_(1, int)]": [False, True, False],
    "[np.issubsctype('S8', str), np.issubsctype(np.array([1]), int)]": [False, True],
    "[np.sctype2char(np.float64), np.sctype2char(complex), np.sctype2char(np.int32)]": ["d", "D", "i"],
    "np.dtype(np.maximum_sctype(np.int8)).char, np.maximum_sctype('f4') is np.longdouble, np.maximum_sctype(str)": [
        "l", True, "str_",
    ],
    "[np.AxisError, np.ComplexWarning, np.RankWarning, np.TooHardError]": [
        "AxisError", "ComplexWarning", "RankWarning", "TooHardError",
    ],
    "[np.VisibleDeprecationWarning, np.ModuleDeprecationWarning]": [
        "VisibleDeprecationWarning", "ModuleDeprecationWarning",
    ],
    "np.DataSource(None).exists('no file of that name')": False,
    "[np.math.factorial(4), np.sys is not None, np.warnings.simplefilter is not None]": [24, True, True],
    "np.loads(b'\\x80\\x02K\\x07.')": 7,
    "np.safe_eval('[1, (2, 3)]')": [1, [2, 3]],
    "[int(b - a) for a, b in [np.byte_bounds(np.zeros(3))]]": [24],
    "np.chararray((2,), itemsize=3).dtype": "|S3",
    "np.compare_chararrays(np.array(['a ']), np.array(['a']), '==', True)": [True],
    "np.format_parser('f8,i4', 'a,b', []).dtype.names": ["a", "b"],
    "np.recfromcsv(io.StringIO('A,B\\n1,2.5\\n3,4'), encoding='utf-8').b": [2.5, 4.0],
    "np.recfromtxt(io.StringIO('1 2\\n3 4'), names='a,b').a": [1, 3],
    "np.ndfromtxt(io.StringIO('1 2'))": [1.0, 2.0],
    "np.mafromtxt(io.StringIO('1,,3'), delimiter=',').mask": [False, True, False],
    "np.get_array_wrap(1, np.zeros(2)) is not None, np.get_array_wrap(1) is None": [True, True],
    "np.deprecate(len, 'size', 'len')([1, 2])": 2,
    "np.deprecate(old_name='size')(len)([1, 2])": 2,
    "np.deprecate_with_doc('old')(len)([1])": 1,
    "np.disp('said', out, False), out.getvalue()": [None, "said"],
    "np.source(len, out), out.getvalue()[:13]": [None, "Not available"],
    "np.who({'x': np.zeros((2, 3))})": None,
    "[np.add_docstring, np.add_newdoc].__len__()": 2,
    "np.geterrobj()": [8192, 521, None],
    "np.seterrobj([8192, 521, None])": None,
    "[np.CLIP, np.WRAP, np.RAISE, np.MAXDIMS > 31, np.BUFSIZE, np.ALLOW_THREADS]": [0, 1, 2, True, 8192, 1],
    "[np.ERR_IGNORE, np.ERR_WARN, np.ERR_RAISE, np.ERR_CALL, np.ERR_PRINT, np.ERR_LOG]": [0, 1, 2, 3, 4, 5],
    "[np.FPE_DIVIDEBYZERO, np.FPE_OVERFLOW, np.FPE_UNDERFLOW, np.FPE_INVALID, np.ERR_DEFAULT]": [1, 2, 4, 8, 521],
    "[np.SHIFT_DIVIDEBYZERO, np.SHIFT_OVERFLOW, np.SHIFT_UNDERFLOW, np.SHIFT_INVALID]": [0, 3, 6, 9],
    "[np.MAY_SHARE_BOUNDS, np.MAY_SHARE_EXACT, np.FLOATING_POINT_SUPPORT]": [0, -1, 1],
    "[np.UFUNC_BUFSIZE_DEFAULT, np.UFUNC_PYVALS_NAME, np.tracemalloc_domain]": [8192, "UFUNC_PYVALS", 389047],
    "[len(np.kernel_version), np.numarray, np.oldnumeric]": [2, "removed", "removed"],
}  # fmt: skip
MODULES = {
    "np.core.umath_tests.inner1d([[1, 2], [3, 4]], [[5, 6], [7, 8]])": [17, 53],
    "np.core.umath_tests.matrix_multiply([[1, 2]], [[3], [4]])": [[11]],
    "[np.core.float_, np.core.numeric.Inf, np.core.numerictypes.string_, np.core.PZERO]": [
        "float64", math.inf, "bytes_", 0.0,
    ],
    "np.core.defchararray.add(['a'], ['b'])": ["ab"],
    "np.core.multiarray.concatenate([[1], [2]])": [1, 2],
    "np.core.records.fromarrays([[1, 2]], names='a').a": [1, 2],
    "np.core.fromnumeric.product([2, 3])": 6,
    "np.lib.pad([1], 1, 'constant')": [0, 1, 0],
    "np.lib.stride_tricks.as_strided(np.arange(3), (2, 2), (8, 8))": [[0, 1], [1, 2]],
    "[np.lib.stride_tricks._broadcast_shape([1], [[1, 2]]), np.lib.format._read_array_header.__name__]": [
        [1, 2], "_read_array_header",
    ],
    "np.lib.function_base.trapz([1, 3])": 2.0,
    "np.lib.index_tricks.r_[1, 2]": [1, 2],
    "np.lib.arraysetops.in1d([1], [1, 2])": [True],
    "np.linalg.linalg.norm([3, 4]), np.linalg.linalg.LinAlgError is np.linalg.LinAlgError": [5.0, True],
    "np.fft.helper.fftfreq(2)": [0.0, -0.5],
    "[np.compat.long, np.compat.asbytes('a'), np.compat.py3k.asstr(b'a'), np.compat.asbytes_nested(['b'])]": [
        "int", b"a", "a", [b"b"],
    ],
    "np.testing.utils.assert_array_equal([1], [1])": None,
    "np.matlib.float_": "float64",
}  # fmt: skip
IMPORTS = {
    "from numpy.core.umath_tests import inner1d as x\nanswer = x([1, 2], [3, 4])": 11,
    "import numpy.core.umath_tests as ut\nanswer = ut.inner1d([1, 2], [3, 4])": 11,
    "from numpy import product, float_\nanswer = [product([2, 3]), float_]": [6, "float64"],
    "from numpy import *\ndef f():\n    return in1d([1], [1])\nanswer = [product([2]), float_, f(), float]": [
        2, "float64", [True], "float",
    ],

    "from numpy.lib.function_base import insert, product\nanswer = [insert([1], 0, 2), product([3])]": [[2, 1], 3],
    "import numpy.lib.arraysetops as sets\nanswer = sets.in1d([1], [2])": [False],
    "from numpy.compat import unicode, long\nanswer = [unicode, long]": ["str", "int"],

}  # fmt: skip
RULES = {
    "np.array([1, 2], copy=False)": [1, 2],
    "np.array(np.arange(2.0), np.int64, copy=False)": [0, 1],
    "(lambda x: np.array(x, copy=False) is x)(np.zeros(2))": True,
    "np.array([[1, 2], [3]]).dtype": "object",
    "[np.append([[1], [2, 3]], [[4]]), np.repeat([[1], [2, 3]], [0, 2])]": [[[1], [2, 3], 4], [[2, 3], [2, 3]]],
    "[np.array_split([[1], [2, 3], []], 2), np.split([[1], [2, 3]], [1]), np.delete([[1], [2, 3]], [0])]": [
        [[[1], [2, 3]], [[]]], [[[1]], [[2, 3]]], [[2, 3]],
    ],
    "[np.take([[1], [2, 3]], [1, 1]), np.shape([[1], [2, 3]]), np.asanyarray([[1], [2, 3]])]": [
        [[2, 3], [2, 3]], [2], [[1], [2, 3]],
    ],
    "sorted(np.random.permutation([([1, 2], 0), ([3], 1)]).tolist())": [[[1, 2], 0], [[3], 1]],
    "pickle.loads(pickle.dumps(np.random.permutation)) is np.random.permutation": True,
    "[np.random.choice([[1, 2], [3]], p=[0, 1]), np.random is sys.modules['numpy.random']]": [[3], True],
    "[np.array([-1, 300], np.uint8), np.asarray([[256]], dtype=np.uint8), np.full(2, -1, np.uint8)]": [
        [255, 44], [[0]], [255, 255],
    ],
    "np.fromstring(b'\\x01\\x02', np.uint8)": [1, 2],
    "np.fromstring('\\x01\\x02', dtype='uint8', count=1)": [1],
    "np.fromstring('1 2', sep=' ')": [1.0, 2.0],
    "np.fromstring(b'12', np.uint8).flags.writeable": True,
    "[np.percentile([1, 2, 4], 50, interpolation='lower'), np.quantile([1, 2], 0.5, interpolation='higher')]": [2, 2],
    "[np.nanpercentile([1, 2], 50, interpolation='lower'), np.nanquantile([1, 2], 0.5, interpolation='lower')]": [1, 1],
    "np.histogram([0, 0, 1], 2, normed=True)[0]": [4 / 3, 2 / 3],
    "np.reshape([1, 2], newshape=(2, 1))": [[1], [2]],
    "[np.vstack(map(np.array, [[1], [2]])), np.hstack(x for x in [[1], [2]])]": [[[1], [2]], [1, 2]],
    "[np.stack(map(np.array, [1, 2])), np.dstack(map(np.array, [1, 2])).shape]": [[1, 2], [1, 1, 2]],
    "np.column_stack(map(np.array, [[1], [2]]))": [[1, 2]],
    "[type(np.meshgrid([1], [2])), type(np.broadcast_arrays([1], [[2]])), type(np.atleast_1d(1, 2))]": ["list"] * 3,
    "[type(np.atleast_2d(1, 2)), np.atleast_3d(1, 2)[1], np.atleast_1d(1)]": ["list", [[[2]]], [1]],
    "[np.nonzero(np.array(3)), np.where([1] == 3), np.where([0, 2])]": [[[0]], [[]], [[1]]],
    "np.where([True, False], 1, 2)": [1, 2],
    "np.cross([1, 2], [3, 4])": -2,
    "np.cross([1, 2], [3, 4, 5])": [10, -5, -2],
    "np.cross([[1, 2, 3], [4, 5, 6]], [[7, 8], [9, 10]])": [[-24, 21, -6], [-60, 54, -5]],
    "np.cross([1, 2, 3], [4, 5, 6])": [-3, 6, -3],
    "np.cross([[1, 3], [2, 4]], [[5, 7], [6, 8]], axis=0)": [-4, -4],
    "[np.sum(x for x in [1, 2]), np.sum([[1, 2]], axis=1)]": [3, [3]],
    "np.unique([[3, 1], [3, 2]], return_inverse=True)[1]": [2, 0, 2, 1],
    "np.unique([[3, 1], [3, 2]], True, True, True)[1:]": [[1, 3, 0], [2, 0, 2, 1], [1, 1, 2]],
    "np.linspace(0, 1, 3.0)": [0.0, 0.5, 1.0],
    "np.loadtxt(['a 1', 'b 2'], converters={0: lambda s: {b'a': 7, b'b': 8}[s]})": [[7.0, 1.0], [8.0, 2.0]],
    "np.genfromtxt(io.StringIO('a b'), dtype=None)": [b"a", b"b"],
}  # fmt: skip
METHODS = {
    "np.array([1, 2], np.uint8).tostring()": b"\x01\x02",
    "np.float32(1).tostring()": b"\x00\x00\x80?",
    "np.array([[1, 5], [2, 9]]).ptp()": 8,
    "np.array([[1, 5], [2, 9]]).ptp(axis=0)": [1, 4],
    "np.array([1], '<i2').newbyteorder()": [256],
    "np.array([1], '<i2').newbyteorder('>').dtype": ">i2",
    "[a.itemset(0, 5), a.itemset((1, 1), 6), a.itemset(0, 1, 7), a]": [None, None, None, [[5, 7], [0, 6]]],
    "np.ma.array([1], np.uint8, mask=False).tostring()": b"\x01",
    "np.ndarray.tostring(np.array([1], np.uint8))": b"\x01",
}
# Arrays with an axis and one element, as numbers.
NUMBERS = {
    "[float(np.array([1.5])), int(np.array([[2.5]])), complex(np.array([1]))]": [1.5, 2, 1 + 0j],
    "'%.2f' % np.array([1.0])": "1.00",
    "'%d of %s' % (np.array([3]), 'x')": "3 of x",
    "'%(a)d' % {'a': np.array([3])}": "3",
    "'%s' % np.array([3, 4])": "[3 4]",
    "['%s' % np.array([3]), '%r' % np.array([3]), '%s' % (np.array([3]),)]": ["[3]", "array([3])", "[3]"],
    "'%s %5.1f %% %d' % (np.array([3]), np.array([1.25]), np.array([[2]]))": "[3]   1.2 % 2",
    "'%*d %-4.*f|' % (3, np.array([5]), 1, np.array([2.5]))": "  5 2.5 |",
    "'%(a)s %(b)e' % {'a': np.array([3]), 'b': np.array([1.0])}": "[3] 1.000000e+00",
    "[float('1.5'), int('0x10', 16), float(2), int(np.float32(2.5))]": [1.5, 16, 2.0, 2],
}
# Indices that are lists; `m` is [[0, 1, 2], [3, 4, 5]].
INDICES = {
    "m[[[0, 1], [1, 2]]]": [1, 5],
    "m[[np.array([0, 1]), [1, 2]]]": [1, 5],
    "m[[slice(0, 1), 2]]": [2],
    "m[[slice(None)] * 1 + [1]]": [1, 4],
    "m[list(zip(*[(0, 1), (1, 2)]))]": [1, 5],
    "m[[each for each in ([1], [0])]]": [3],
    "m[[rows]], m[[..., 0]], m[[None, 1]]": [[[3, 4, 5]], [0, 3], [[3, 4, 5]]],
    "m[places], m[[rows[0], 0]], m[[1]], m[[True, False]]": [[4], [[3, 4, 5], [0, 1, 2]], [[3, 4, 5]], [[0, 1, 2]]],
    "m[:, [[0, 1]]], m.tolist()[[0, 1][-1]], {'a': 7}[['a'][0]]": [[[[0, 1]], [[3, 4]]], [3, 4, 5], 7],
    "m.reshape(-1)[[[0, 1], [2, 3]]]": [[0, 1], [2, 3]],
    "np.array([(1, 2)], 'i4,i4')[['f0']][0][0]": 1,
    "change(m)": [[7, 1, 2], [3, 9, 5]],
}
INDEX = """
m, rows = np.arange(6).reshape(2, 3), [1]
places = []
places += [[1], [1]]
def change(m):
    m[[[0, 1], [0, 1]]] = 7
    m[[[1], rows]] += 2
    return m
"""
BEGIN = "import io, pickle, sys\nimport numpy as np\nout = io.StringIO()\na = np.zeros((2, 2), int)\n"


@pytest.mark.parametrize("expression", [*NAMES, *MODULES, *RULES, *METHODS, *NUMBERS, *INDICES])
def test_what_a_script_says_gives_what_it_gave(expression):
    expected = {**NAMES, **MODULES, **RULES, **METHODS, **NUMBERS, **INDICES}[expression]
    text = BEGIN + ("import numpy.matlib\n" if "matlib" in expression else "") + INDEX * (expression in INDICES)
    assert answer_of(f"{text}answer = {expression}") == expected


@pytest.mark.parametrize("text", IMPORTS)
def test_names_are_imported_in_every_form(text):
    assert answer_of(text) == IMPORTS[text]


def test_every_name_of_the_table_has_a_case():
    said = " ".join([*NAMES, *MODULES, *RULES, *METHODS])
    tables = (removed_of_numpy.GONE_BEFORE_2, removed_of_numpy.GONE_SINCE_2, removed_of_numpy.WRAPPED)
    names = [name.replace("numpy.", "np.", 1) for table in tables for name in table]
    without = {"np.save", "np.savez", "np.savez_compressed", "np.core.umath_tests"}  # test_neighbours.py, and above
    assert [name for name in names if f"{name}" not in said and name not in without] == []


@pytest.mark.parametrize("name", ["sum", "unique", "array", "reshape"])
def test_wrappers_look_like_the_functions(name):
    function = answer_of(f"import numpy as np\nanswer = lambda: np.{name}", is_plain=False)()
    assert (function.__name__, function.__doc__) == (name, getattr(numpy, name).__doc__)


def test_errors_of_today_stay_where_they_were_errors_before():
    for expression, error in {
        "np.array([[1, 2], [3]], dtype=float)": ValueError,
        "np.zeros(2).no_such_method": AttributeError,
        "np.no_such_name": AttributeError,
        "np.zeros(3).itemset(5)": ValueError,
        "np.array([2 ** 70], np.uint8)": OverflowError,
        "float(np.zeros(2))": TypeError,
        "np.linspace(0, 1, 'x')": ValueError,
    }.items():
        with pytest.raises(error):
            answer_of(f"import numpy as np\nanswer = {expression}")


def test_the_version_of_numpy_is_known_without_loading_it():
    assert numpy_version() == tuple(map(int, numpy.__version__.split(".")[:2]))


@pytest.mark.parametrize("reaction", ["ignore", "warn", "raise", "call", "print", "log"])
def test_each_reaction_to_an_error_has_its_number(reaction):
    with numpy.errstate(all="ignore", over=reaction):
        given = old_numpy.geterrobj()
    with numpy.errstate():
        old_numpy.seterrobj(given)
        assert numpy.geterr() == {"divide": "ignore", "over": reaction, "under": "ignore", "invalid": "ignore"}


def test_functions_that_numba_compiles_stay_as_they_are():
    text = "import numba\ndef f(x):\n    return int(x), '%d' % x, x.ptp(), x[[x]]\nanswer = f"
    namespace = {}
    exec(compile_source(text.replace("import numba", "numba = 1").encode(), "old_script.py"), namespace)
    assert namespace["f"].__code__.co_names == ("int", "ptp")


def test_only_the_file_has_the_names():
    answer_of("import numpy as np\nanswer = [np.float, np.in1d([1], [1]), np.zeros(2).ptp()]")
    assert "float" not in vars(numpy)
    assert pickle.loads(pickle.dumps(numpy.array([1]))).tolist() == [1]
    if numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        assert not {"product", "in1d", "Inf", "trapz"} & vars(numpy).keys() and not hasattr(numpy.ndarray, "ptp")
