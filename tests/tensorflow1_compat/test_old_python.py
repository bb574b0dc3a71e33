"""The results that Python 3.5 to 3.11 gave scripts, in a file loaded as the user's: on every Python."""

from __future__ import annotations

import locale
import random
import sys
import unittest

import pytest

from tensorflow1_compat import journal, proxies
from tensorflow1_compat.old_python import removed_names
from tensorflow1_compat.tree import SourceTree
from tests.npu_run.launching import ROOT, npu_run, write_script
from tests.tensorflow1_compat.old_scripts import answer_of

# Code of a script -> its old result.
NAMES = {
    "import collections\nanswer = [isinstance(x, collections.Iterable) for x in ([], 1)]": [True, False],
    "from collections import Callable, Sequence\nanswer = [Callable, Sequence]": ["Callable", "Sequence"],
    "import inspect\nanswer = inspect.getargspec(lambda a, b=2, *c, **d: 0)": [["a", "b"], "c", "d", [2]],
    "import time\nanswer = time.clock() >= 0": True,
    "import fractions\nf = fractions.gcd\nanswer = [f(4, 6), f(-4, -6), f(4, -6), f(0, 5)]": [
        2, -2, -2, 5,
    ],
    "from fractions import gcd, Fraction\nanswer = gcd(Fraction(1, 2), Fraction(3, 4)) == Fraction(1, 4)": True,
    "import base64\nanswer = [base64.encodestring(b'a'), base64.decodestring(b'YQ==')]": [b"YQ==\n", b"a"],
    "import cgi\nanswer = [cgi.escape('<\">'), cgi.escape('\"', quote=True)]": ['&lt;"&gt;', "&quot;"],
    "import cgi\nanswer = cgi.parse_header('form-data; NAME=\"a;b\"; file=\"c\\\\\"d\"; x')": [
        "form-data", {"name": "a;b", "file": 'c"d'},
    ],
    "import platform\nanswer = [len(platform.dist()), len(platform.linux_distribution())]": [3, 3],
    "import os\nanswer = os.errno.ENOENT": 2,
    "import xml.etree.cElementTree as ET\nanswer = ET.fromstring('<a b=\"c\"/>').get('b')": "c",
    "import asyncio\n@asyncio.coroutine\ndef f():\n    yield\nanswer = hasattr(f(), 'send')": True,
    "import locale\nanswer = [locale.format('%d', 5), locale.format('%.2f', 1.5, grouping=True)]": ["5", "1.50"],
    "import logging\nlogging._acquireLock()\nanswer = logging._releaseLock()": None,
    "import configparser\nanswer = configparser.SafeConfigParser().sections()": [],
    "from importlib import find_loader\nanswer = [find_loader('json') is None, find_loader('no_such')]": [False, None],
    "from pkgutil import find_loader\nanswer = [find_loader('json') is None, find_loader('no_such')]": [False, None],
    "import pkgutil, json\nanswer = [pkgutil.get_loader(x) is None for x in ('json', json)]": [False, False],
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): pass\n"
    "answer = [unittest.makeSuite(T).countTestCases(), unittest.getTestCaseNames(T, 'test')]": [1, ["test_a"]],
    "import unittest, types\nanswer = unittest.findTestCases(types.ModuleType('m')).countTestCases()": 0,
    "import random\nanswer = sorted(random.sample({1, 2, 3}, 3))": [1, 2, 3],
    "import random\nx = {1: 2}\nanswer = random.sample(x.keys(), 1) + random.sample(x.items(), 1)": [1, [1, 2]],
    "import random as r\nanswer = [r.randint(2.0, 6 / 3), r.randrange(1.0), r.randrange(1.0, 2.0)]": [2, 0, 1],
    "import random\nx = [1, 2, 3]\nrandom.shuffle(x, lambda: 0.5)\nanswer = x": [1, 3, 2],
    "import random\nx = [1, 2, 3]\nrandom.shuffle(x, random=lambda: 0.0)\nanswer = x": [2, 3, 1],
    "import random\nx = [1]\nrandom.shuffle(x)\nanswer = x": [1],
    "import math\nanswer = [math.factorial(4.0), math.factorial(3)]": [24, 6],
    "import json\nanswer = json.loads('1', encoding='utf-8')": 1,
}  # fmt: skip
MODULES = {
    "import imp\nanswer = [imp.new_module('m').__name__, imp.PY_SOURCE, imp.get_tag() is not None]": ["m", 1, True],
    "from imp import reload\nimport json\nanswer = reload(json) is json": True,
    "import imp\nanswer = [imp.find_module('json')[2], imp.find_module('sys')[1:]]": [["", "", 5], [None, ["", "", 6]]],
    "import imp\nanswer = [s for s, m, k in imp.get_suffixes() if k == imp.PY_SOURCE]": [".py"],
    "import imp\nanswer = [imp.is_builtin('sys'), imp.is_builtin('json'), imp.lock_held()]": [1, 0, False],
    "import imp\nanswer = [imp.cache_from_source('a.py').startswith('__pycache__'), len(imp.get_magic())]": [True, 4],
    "from distutils.version import LooseVersion, StrictVersion\n"
    "answer = [LooseVersion('1.10') > '1.9', StrictVersion('1.2a1') < StrictVersion('1.2')]": [True, True],
    "import distutils.version\nanswer = str(distutils.version.LooseVersion('1.10'))": "1.10",
    "from distutils.util import strtobool\nanswer = [strtobool('yes'), strtobool('0')]": [1, 0],
    "from distutils import dir_util, spawn\nanswer = [callable(dir_util.copy_tree), spawn.find_executable('sh')[0]]": [
        True, "/",
    ],
    "from distutils.core import setup\nfrom distutils.extension import Extension\nanswer = callable(setup)": True,
    "import imghdr\nanswer = [imghdr.what(None, b) for b in (b'\\x89PNG\\r\\n\\x1a\\n', b'GIF89a', b'x' * 32)]": [
        "png", "gif", None,
    ],
    "import imghdr\nanswer = [imghdr.what(None, b) for b in (b'....  JFIF', b'P5 1', b'BM', b'RIFF....WEBP', b'MM')]": [
        "jpeg", "pgm", "bmp", "webp", "tiff",
    ],
    "from pipes import quote\nanswer = quote('a b')": "'a b'",
}  # fmt: skip
METHODS = {
    "import array\nx = array.array('b')\nx.fromstring(b'a')\nanswer = x.tostring()": b"a",
    "import threading\nanswer = [threading.Thread().isAlive(), threading.current_thread().isAlive()]": [False, True],
    "import xml.etree.ElementTree as ET\nx = ET.fromstring('<a><b><c/></b></a>')\n"
    "answer = [[y.tag for y in z] for z in (x.getchildren(), x.getiterator(), x.getiterator('c'))]": [
        ["b"], ["a", "b", "c"], ["c"],
    ],
    "import html.parser\nanswer = html.parser.HTMLParser().unescape('&lt;')": "<",
    "import configparser\nx = configparser.ConfigParser()\nx.readfp(['[a]', 'b = 1'])\nanswer = x.get('a', 'b')": "1",
}  # fmt: skip
ASSERTIONS = """
import unittest
class T(unittest.TestCase):
    def passing(self):
        self.assertEquals(1, 1)
        self.assertNotEquals(1, 2)
        self.assertAlmostEquals(1.0, 1.0)
        self.assertNotAlmostEquals(1.0, 2.0)
        self.assertItemsEqual([1, 2], [2, 1])
        self.assertRegexpMatches("ab", "b")
        super().assertNotRegexpMatches("ab", "c")
        self.assertDictContainsSubset({1: 2}, {1: 2, 3: 4})
        self.assert_(True)
        self.failUnless(True)
        self.failIf(False)
        self.failUnlessEqual(1, 1)
        self.failUnlessRaises(ValueError, int, "x")
        with self.assertRaisesRegexp(ValueError, "invalid"):
            int("x")
    def failing(self):
        self.assertEquals(1, 2)
    def also_failing(self):
        self.assertDictContainsSubset({1: 3}, {1: 2})
answer = T
"""


@pytest.mark.parametrize("text", [*NAMES, *MODULES, *METHODS])
def test_what_a_script_says_gives_what_it_gave(text):
    assert answer_of(text) == {**NAMES, **MODULES, **METHODS}[text]


def test_assertions_of_old_pass_and_fail():
    case = answer_of(ASSERTIONS, is_plain=False)
    for name, is_right in {"passing": True, "failing": False, "also_failing": False}.items():
        result = unittest.TestResult()
        case(name).run(result)
        assert result.wasSuccessful() == is_right and not result.errors, result.errors


def test_seeds_of_any_kind_give_the_numbers_they_gave():
    text = "import random, numpy\nrandom.seed({})\nanswer = random.random()"
    for seed, same in {"numpy.int64(7)": 7, "(1, 2)": hash((1, 2)), "7": 7, "'a'": "a", "1.5": 1.5}.items():
        random.seed(same)
        expected = random.random()
        assert answer_of(text.format(seed)) == expected, seed


def test_the_locale_is_set_anew(monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    before = locale.setlocale(locale.LC_ALL)
    assert answer_of("import locale\nanswer = locale.resetlocale()") is None
    locale.setlocale(locale.LC_ALL, before)


@pytest.mark.parametrize("mode", ["'U'", "'rU'", "mode='rU'", "'r'"])
def test_files_are_opened_in_modes_of_old(tmp_path, mode):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo")
    assert answer_of(f"import io\nanswer = open({str(tmp_path / 'a.txt')!r}, {mode}).read()") == "one\ntwo"


def test_modules_that_imp_loads_are_the_users_own_only_in_the_tree(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        module = "import numpy as np\ntry:\n    X = np.float\nexcept AttributeError:\n    X = None\n"
        write_script(folder, module, "one_of_two.py")
        write_script(folder, "Y = 2\n", "package/__init__.py")
    text = (
        "import imp\nfound = [imp.load_source('one_of_two', f'{0}/one_of_two.py').X]\n"
        "found.append(imp.load_module('package', *imp.find_module('package', ['{0}'])).Y)\n"
        "found.append(imp.load_module('one_of_two', *imp.find_module('one_of_two', ['{0}'])).X)\nanswer = found"
    )
    try:
        proxies.serve_proxies(SourceTree([str(inside)]))
        assert answer_of(text.replace("{0}", str(inside))) == ["float", 2, "float"]
        for name in ("one_of_two", "package"):
            del sys.modules[name]
        assert answer_of(text.replace("{0}", str(outside))) == [None, 2, None]
    finally:
        proxies.serve_proxies(None)
        for name in ("one_of_two", "package"):
            sys.modules.pop(name, None)


def test_errors_of_today_stay_where_they_were_errors_before():
    for text, error in {
        "import random\nrandom.randint(1.5, 3)": (TypeError, ValueError),
        "import math\nmath.factorial(1.5)": (TypeError, ValueError),
        "import time\ntime.clocks()": AttributeError,
        "import imp\nimp.find_module('no_such')": ImportError,
        "import threading\nthreading.Thread().is_alife()": AttributeError,
        "open('x', 'rx')": ValueError,
        "class A: pass\nA().isAlive()": AttributeError,
        "import no_such": ModuleNotFoundError,
        "import locale\nlocale.format('%d %d', 5)": ValueError,
    }.items():
        with pytest.raises(error):
            answer_of(text + "\nanswer = 0")


def test_the_error_of_a_missing_method_is_that_of_python():
    with pytest.raises(AttributeError) as error:
        answer_of("class A: pass\nanswer = A().isAlive()")
    assert str(error.value) == "'A' object has no attribute 'isAlive'"
    assert error.traceback[-1].frame.code.raw.co_filename == "old_script.py"


def test_every_name_of_the_tables_has_a_case():
    said = " ".join([*NAMES, *MODULES, *METHODS, ASSERTIONS])
    known = sys.stdlib_module_names | {"imp", "distutils", "cgi", "imghdr", "pipes"}
    tables = (removed_names.GONE_NAMES, removed_names.GONE_MODULES, removed_names.GONE_METHODS)
    names = [name for table in tables for name in table if name.partition(".")[0] in known]
    without = {
        name
        for name in names
        if name.startswith("collections.") or "fail" in name or name in ("time.clock", "locale.resetlocale")
    }
    assert [name for name in names if name.rpartition(".")[2] not in said and name not in without] == []


def test_a_script_without_tensorflow_and_its_modules_have_old_names_and_nobody_else(tmp_path):
    write_script(tmp_path / "own", OWN, "helper.py")
    write_script(tmp_path, SCRIPT)
    write_script(tmp_path / "installed" / "site-packages", INSTALLED, "neighbour.py")
    code, output = npu_run("train.py", cwd=tmp_path)
    assert code == 0 and "said 6 False b'\\x01' 2 ['product', 'float']" in output, output
    assert "own/helper.py:3: numpy.float: numpy no longer has it; builtins.float is used" in output


OWN = """
import numpy as np
np.float
from imp import reload

def found():
    return [np.product([2, 3]), np.zeros(1, np.uint8).ptp() > 0, np.array([1], np.uint8).tostring()]
"""
SCRIPT = """
import sys
from own import helper
import numpy as np
sys.path.append("installed/site-packages")
import neighbour
import threading
threading.Thread().isAlive()
print("said", *helper.found(), len(np.array([[1], [2, 3]])), neighbour.lacks())
"""
INSTALLED = """
import numpy

def lacks():
    has_product = int(numpy.__version__.partition(".")[0]) < 2
    assert hasattr(numpy, "product") == has_product and not hasattr(numpy, "float")
    return ["product", "float"]
"""


def test_the_script_of_the_page_prints_what_the_page_says(tmp_path):
    page = (ROOT / "docs" / "ported.md").read_text()
    script, printed = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "text"))
    write_script(tmp_path, script)
    code, output = npu_run("--tf1", "train.py", cwd=tmp_path, PYTHONWARNINGS="ignore")
    lines = [line for line in output.splitlines() if not line.startswith("npu-run: ")]
    assert code == 0 and lines == printed.splitlines()


def test_each_of_many_subjects_is_printed_once(monkeypatch, capfd):
    monkeypatch.setattr(journal, "_ENTRIES", {})
    for number in (*range(300), *range(300)):
        journal.say_once(f"name.{number**5}", "is told")
    assert len(capfd.readouterr().err.splitlines()) == 300
