"""`npu-run check`, also with `--run`: what a script uses, told with file and line."""

from __future__ import annotations

import ast
import importlib.machinery
import json
import os
import sys

import pytest
from click.testing import CliRunner

from npu_run.check import check
from tests.npu_run.launching import finish, npu_run, start, write_script

SCRIPT = """
from npu_bridge.npu_init import *
import tensorflow as tf
import numpy as np, time
from package import old
try:
    from tensorflow.contrib import nothing_of_that_name
except ImportError:
    pass
if "concat_v2" in dir(tf):
    tf.concat_v2
if tf.__version__ < "1.0":
    tf.pack
x = tf.placeholder(tf.float32, [2])
w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
loss = tf.reduce_sum(tf.square(w * x - 1.0))
train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
config = tf.ConfigProto()
custom_op = config.graph_options.rewrite_options.custom_optimizers.add()
custom_op.name = "NpuOptimizer"
custom_op.parameter_map["precision_mode"].s = tf.compat.as_bytes("allow_mix_precision")
custom_op.parameter_map["enable_scope_fusion_passes"].s = b"x"  # parameter_map["not_this"]
hparams, more = tf.contrib.training.HParams(rate=0.1), NPURunConfig(**{})
start = time.clock()
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for _ in range(3):
        print("loss", session.run([train_op, loss], {x: np.ones(2, np.float)})[1])
"""


def folder_with(tmp_path, text=SCRIPT, module="import numpy as np\nA = np.int\n"):
    write_script(tmp_path, text)
    write_script(tmp_path, module, "package/old.py")
    return tmp_path


def checked(tmp_path, *options):
    result = CliRunner().invoke(check, [*options, str(tmp_path / "train.py")])
    return result.exit_code, result.output


def test_a_script_that_works_is_described(tmp_path, monkeypatch):
    monkeypatch.chdir(folder_with(tmp_path))
    code, output = checked(tmp_path, "--json")
    facts = json.loads(output)
    assert (code, facts["tensorflow"], facts["files"]) == (0, 1, 2)
    of = {each["what"]: each for each in facts["findings"]}
    assert of["option precision_mode"]["kind"] == "option" and of["option precision_mode"]["place"] == "train.py:21"
    assert of["option enable_scope_fusion_passes"]["kind"] == "ignored" and "option not_this" not in of
    assert "option **" not in of
    assert of["option precision_mode"]["severity"] == "changes numbers"
    assert of["numpy.int"] == {
        "kind": "healed",
        "what": "numpy.int",
        "remark": "builtins.int is used where it is gone",
        "place": "package/old.py:2",
        "severity": "harmless",
    }
    assert {"time.clock", "numpy.float", "tf.contrib.training.HParams"} <= set(of)
    assert of["tf.contrib.nothing_of_that_name"]["kind"] == "ignored"
    code, page = checked(tmp_path)
    assert code == 0 and "package/old.py:2: numpy.int" in page
    assert page.endswith("Nothing was found that cannot work.\n")


def test_what_cannot_work_is_named_and_ends_with_1(tmp_path, monkeypatch):
    text = SCRIPT + "tf.contrib.nonsense.f()\ntf.train.AdamOptimiser\nfrom npu_bridge.npu_init import nothing\n"
    monkeypatch.chdir(folder_with(tmp_path, text, "print 'old'\n"))
    code, output = checked(tmp_path, "--json")
    fatal = {each["what"]: each for each in json.loads(output)["findings"] if each["kind"] == "cannot work"}
    assert code == 1
    assert fatal["tf.contrib.nonsense"]["place"] == "train.py:29"
    assert "tf.train.AdamOptimiser" in fatal and "npu_bridge.npu_init.nothing" in fatal
    assert fatal["syntax of package/old.py:1"]["remark"].endswith("make it Python 3")
    assert len(fatal) == 4


STARS = """
from names import *
from names import tf as again
from npu_bridge.npu_init import *
import os, sys
from not_installed_anywhere import thing
try:
    import guarded_package
except ImportError:
    guarded_package = None
import helper_of_tensorflow_1
from lib_of_project import f
session = tf.Session()
session.run(os.environ["RANK_ID"] + os.environ["OF_NOBODY"] + os.environ.get("WITH_DEFAULT", ""))
os.environ["SET_HERE"] = "1"
print(os.environ["SET_HERE"])
tf.contrib.layers.nosuch(1)
again.nn.nosuch()
optimizer = NPUOptimizer(tf.train.AdamOptimizer(rate=0.1), loss_scale=2)
tf.placeholder(tf.float32, [1], "x", 4)
tf.nn.dropout(*[1], keep_prob=0.5)
tf.transpose(1, **{"axis": 2})
slim = tf.contrib.slim
with slim.arg_scope([slim.conv2d], kernel_size=3):
    slim.conv2d(1, 2)
tf.layers.dense(1)
tf.nn.gelu(1)
scope = "a name of its own, not that of the star"
scope.upper()
join = tf.concat_v2 if hasattr(tf, "concat_v2") else tf.concat
if "image_summary" in dir(tf) and scope:
    tf.image_summary("x", tf.nn.nosuch2)
else:
    tf.summary.image("x", 1)
tf.scalar_summary
try:
    both = tf.concat
except AttributeError:
    both = tf.concat_v3
both([1], 0)
try:
    tf.reduce_sum(1, of="what may fail")
except TypeError:
    pass
flags = tf.app.flags
def size(flags, more=flags.no_such_flag):
    return flags.of_an_argument
size(flags.FLAGS)
from tensorflow.contrib.layers import *
tf.contrib.layers.l2_regularizer(0.1)
"""


def test_stars_aliases_calls_packages_and_variables_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(folder_with(tmp_path, STARS))
    write_script(
        tmp_path, "import tensorflow as tf\nfrom names_circle import *\nscope = tf.variable_scope\n", "names.py"
    )
    write_script(tmp_path, "from names import *\n", "names_circle.py")
    write_script(tmp_path, "f = 1\n", "src/deep/lib_of_project.py")
    elsewhere = tmp_path.with_name("elsewhere")
    helper = elsewhere / "helper_of_tensorflow_1"
    write_script(helper, "import tensorflow as tf\nx = tf.placeholder\n", "__init__.py")
    monkeypatch.syspath_prepend(elsewhere)
    code, output = checked(tmp_path, "--json")
    stops = {one["what"]: one["remark"] for one in json.loads(output)["findings"] if one["severity"] == "stops it"}
    assert code == 1
    assert stops.pop("package helper_of_tensorflow_1").endswith(f"start with npu-run --tree {helper}")
    assert "package helper_of" not in checked(tmp_path, "--json", "--tree", str(elsewhere))[1]  # a folder above it
    assert "pip" not in stops.pop("package not_installed_anywhere")
    assert stops.pop("package lib_of_project").endswith("start with PYTHONPATH=src/deep")
    assert "without a default" in stops.pop("environment variable OF_NOBODY")
    assert "has no argument 'rate'; it has learning_rate" in stops.pop("tf.train.AdamOptimizer(...)")
    said = stops.pop("npu_bridge.npu_init.NPUOptimizer(...)")
    assert said.startswith("NPUOptimizer: unknown argument 'loss_scale'. Expected one of opt, ")
    assert stops.pop("tf.placeholder(...)") == "it takes 3 arguments without a name, not 4"
    assert stops.pop("tf.layers.dense(...)") == "it needs the argument 'units'"
    stops.pop("tf.app.flags.no_such_flag")
    assert set(stops) == {"tf.contrib.layers.nosuch", "tf.nn.nosuch", "tf.nn.nosuch2", "tf.scalar_summary"}


def test_names_that_a_script_takes_of_os_are_no_part_of_the_interface(tmp_path):
    write_script(tmp_path, "from npu_bridge.npu_init import *\nprint(os.path.exists('x'), get_rank_id())\n")
    code, output = checked(tmp_path)
    assert code == 0 and "train.py:2: npu_bridge.npu_init.get_rank_id" in output and "npu_init.os" not in output


@pytest.mark.parametrize(
    ("text", "is_old"),
    [
        ("print 'old'", True),
        ("try:\n    f()\nexcept ValueError, error:\n    pass", True),
        ("mode = 0755", True),
        ("raise ValueError, 'old'", True),
        ("exec 'old'", True),
        ("if x:\n        f()\n\tg()", True),
        ("x = f(1,\ny = 2", False),
        ("print('unclosed'", False),
        ("def f(x)\n    pass", False),
        ("x = 'unclosed", False),
    ],
)
def test_only_what_python_2_took_is_asked_to_be_python_2(tmp_path, text, is_old):
    write_script(tmp_path, text)
    assert ("is it Python 2?" in checked(tmp_path)[1]) == is_old


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe (FIFO)"), ("/dev/null", "a device")):
        code, output = finish(start("check", str(path), cwd=tmp_path), limit_secs=60)
        expected = f"npu-run check: {path} is {kind}, which is not followed or read here; expected a regular file\n"
        assert (code, output) == (2, expected)


def test_a_script_of_tensorflow_2_is_not_held_to_1_15(tmp_path):
    write_script(tmp_path, "import tensorflow as tf\ntf.random.set_seed(1)\ntf.optimizers.Lion()\n")
    code, output = checked(tmp_path)
    assert code == 0 and "a script of TensorFlow 2" in output
    assert checked(tmp_path, "--tf1")[0] == 1


@pytest.mark.slow("runs the script that it checks")
def test_the_report_holds_what_was_met(tmp_path):
    folder_with(tmp_path)
    words = ["check", "--run", "--out", "report.json", "train.py"]
    code, output = finish(start(*words, cwd=tmp_path, TF_CPP_MIN_LOG_LEVEL="2"), limit_secs=240)
    assert code == 0 and "option precision_mode" in output and "found while it ran:" in output
    facts = json.loads((tmp_path / "report.json").read_text())
    met = {each["what"]: each["kind"] for each in facts["met"]}
    assert met["numpy.int"] == met["time.clock"] == "friction"
    assert met["tensorflow.contrib.nothing_of_that_name"] == "missing"
    assert facts["tensorflow"] == 1 and facts["findings"]


def test_arguments_are_for_the_run_whose_exit_code_it_is(tmp_path):
    write_script(tmp_path, "import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    code, output = finish(start("check", "--run", "train.py", "--json", "--", cwd=tmp_path))
    assert code == 3 and "['--json', '--']" in output and output.endswith("Nothing was found that cannot work.\n")
    code, output = checked(tmp_path, "--run", "--json")
    assert code == 2 and "Use --run --out FILE." in output


def test_a_script_may_change_its_folder_and_its_arguments(tmp_path):
    write_script(tmp_path, "import os, sys\nsys.argv.clear()\nos.chdir('/')\n")
    code, output = finish(start("check", "--run", "train.py", cwd=tmp_path))
    assert code == 0 and output.endswith("Nothing was found that cannot work.\n")


def test_modules_that_a_script_finds_above_itself_are_read(tmp_path, monkeypatch):
    project = folder_with(tmp_path / "project")
    text = "import os, sys\nsys.path.append(os.path.join(os.path.dirname(__file__), '..'))\nfrom package import old\n"
    write_script(project / "tools", text)
    monkeypatch.chdir(tmp_path)
    assert json.loads(checked(project / "tools", "--json")[1])["files"] == 2


def test_what_another_project_has_is_still_needed(tmp_path):
    for name in ("own/README.md", "other/beside_this.py"):
        write_script(tmp_path, "", name)
    write_script(tmp_path / "own", "import tensorflow as tf\nimport beside_this\ntf.placeholder(tf.float32)\n")
    assert "package beside_this" in checked(tmp_path / "own")[1]


@pytest.mark.slow("runs the script that it checks")
def test_a_module_where_python_does_not_look_is_named_with_its_folder(tmp_path, monkeypatch):
    own, script = tmp_path / "own", "import tensorflow as tf\nfrom package import old\ntf.placeholder\n"
    write_script(own / "package", "A = 1\n", "old.py")
    write_script(own / "tools", script)
    write_script(own / "tools", "", "__init__.py")
    monkeypatch.chdir(own)
    monkeypatch.setattr("sys.path", [str(own), *sys.path])  # as `python -m` has it
    said = "train.py:2: package package: it is in ., where Python does not look: start with PYTHONPATH=."
    code, output = checked(own / "tools")
    assert code == 1 and said in output, output
    assert "ModuleNotFoundError: No module named 'package'" in npu_run("tools/train.py", cwd=own)[1]
    assert npu_run("tools/train.py", cwd=own, PYTHONPATH=os.pathsep.join([".", *sys.path[1:]]))[0] == 0
    monkeypatch.setattr("sys.path", [sys.path[0], str(own), *sys.path[1:]])  # by PYTHONPATH
    assert checked(own / "tools")[0] == 0
    monkeypatch.setattr("sys.path", sys.path[:1] + sys.path[2:])
    write_script(own / "tools", f"import sys\nsys.path.append({str(own)!r})\n{script}")
    assert checked(own / "tools")[0] == 0


def test_a_module_of_cython_is_to_be_built(tmp_path, monkeypatch):
    script = "import tensorflow as tf\nfrom package.bbox import overlaps\ntf.placeholder(tf.float32)\n"
    folder_with(tmp_path, script)
    write_script(tmp_path / "package", "def overlaps(): pass\n", "bbox.pyx")
    monkeypatch.chdir(tmp_path)
    code, output = checked(tmp_path)
    assert code == 1 and "train.py:2: module package/bbox.pyx: only its source is there" in output, output
    for text in (script.replace("import t", "import pyximport\nimport t", 1), script):
        write_script(tmp_path, text)
        if text == script:
            write_script(tmp_path / "package", "", "bbox" + importlib.machinery.EXTENSION_SUFFIXES[0])
        assert "bbox.pyx" not in checked(tmp_path)[1]


def test_a_project_on_the_path_is_parsed_once(tmp_path, monkeypatch):
    """It is no package to be read for itself, and what speaks for an era is found in the same pass."""
    folder = folder_with(tmp_path, "import tensorflow as tf\nimport package.old\n", "import tensorflow as tf\n")
    write_script(folder / "package", "from package.old import tf\n", "__init__.py")
    monkeypatch.syspath_prepend(str(folder))
    parsed, parse = [], ast.parse
    monkeypatch.setattr(ast, "parse", lambda source, path="", *more: parsed.append(str(path)) or parse(source, path))
    code, output = checked(folder)
    own = [path for path in parsed if path.startswith(str(tmp_path))]
    assert code == 0 and len(own) == len(set(own)) == 3, own


def test_a_long_chain_of_imports_is_read(tmp_path):
    for number in range(300):
        write_script(tmp_path, f"from module_{number + 1} import *\nfrom os import getcwd\n", f"module_{number}.py")
    write_script(tmp_path, "import tensorflow as tf\n", "module_300.py")
    write_script(tmp_path, "from module_0 import *\n")
    code, output = checked(tmp_path)
    assert code == 0 and "302 file(s) read" in output, output


def test_one_of_two_imports_of_a_name_may_be_missing(tmp_path):
    text = (
        "import tensorflow as tf\nif tf.version:\n    import Queue as queue\nelse:\n    import queue\ntf.placeholder\n"
    )
    write_script(tmp_path, text)
    assert "Queue" not in checked(tmp_path)[1]
    write_script(tmp_path, text.replace("import queue", "queue = None"))
    assert "package Queue" in checked(tmp_path)[1]


@pytest.mark.slow("several starts of the command")
def test_a_script_inside_its_own_package_is_read_with_the_modules_beside_it(tmp_path, monkeypatch):
    for package in ("src/game", "src/game/worker", "src/game/lib"):
        write_script(tmp_path, "", f"{package}/__init__.py")
    write_script(tmp_path, "import tensorflow as tf\nSession = tf.Session\n", "src/game/lib/graphs.py")
    script = "import sys\nsys.path.append('src')\nfrom game.lib import graphs\nprint('a session is', graphs.Session)\n"
    write_script(tmp_path / "src" / "game" / "worker", script, "optimize.py")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(check, ["--json", "src/game/worker/optimize.py"])
    facts = json.loads(result.output)
    assert (facts["tensorflow"], facts["files"]) == (1, 4), result.output
    code, output = npu_run("src/game/worker/optimize.py", cwd=tmp_path)
    assert code == 0 and "a session is" in output, output


UNUSED = """
import tensorflow as tf
import old
from old import by_name, renamed as other

def never():
    also_never()

def also_never():
    tf.contrib.never.f()

def asked_for():
    tf.contrib.asked_for.f()

class Model(object):
    def build(self):
        asked_for()

@tf.contrib.framework.add_arg_scope
def registered():
    tf.contrib.registered.f()

if __name__ == "__main__":
    Model().build()
    getattr(old, "by_" "name")
    other()
"""
OLD = """
import tensorflow as tf

def by_name():
    tf.contrib.by_name.f()

def renamed():
    tf.contrib.renamed.f()

def for_tests():
    tf.contrib.for_tests.f()

if __name__ == "__main__":
    for_tests()
"""


def test_functions_that_nothing_calls_stop_no_script(tmp_path, monkeypatch):
    write_script(tmp_path, OLD, "old.py")
    monkeypatch.chdir(write_script(tmp_path, UNUSED).parent)
    findings = {each["what"]: each for each in json.loads(checked(tmp_path, "--json")[1])["findings"]}
    severity = {what.rpartition(".")[2]: findings[what]["severity"] for what in findings if "framework" not in what}
    stops = dict.fromkeys(("asked_for", "registered", "by_name", "renamed"), "stops it")
    assert severity == {**stops, "never": "harmless", "for_tests": "harmless"}
    assert "nothing here calls also_never" in findings["tf.contrib.never"]["remark"]


def test_a_script_that_looks_functions_up_may_call_any(tmp_path, monkeypatch):
    text = UNUSED + "\nimport sys\ngetattr(old, sys.argv[1])()\n"
    write_script(tmp_path, OLD, "old.py")
    monkeypatch.chdir(write_script(tmp_path, text).parent)
    findings = json.loads(checked(tmp_path, "--json")[1])["findings"]
    assert [each["severity"] for each in findings if each["what"] == "tf.contrib.never"] == ["stops it"]


def test_modules_that_python_had_are_given_or_their_package_is_named(tmp_path):
    text = "import tensorflow as tf\nimport imp, distutils.version, cgi, telnetlib\ntf.placeholder\nx.tostring()\n"
    write_script(tmp_path, text)
    output = checked(tmp_path)[1]
    lines = [line for line in output.splitlines() if "pip install" in line]
    is_there = "telnetlib" in sys.stdlib_module_names
    assert [line.partition("pip install ")[2].partition(",")[0] for line in lines] == (
        [] if is_there else ["standard-telnetlib"]
    )
    assert "train.py:4: an old tostring" in output


def test_what_other_code_changes_is_not_taken_as_it_was_written(tmp_path):
    changed = 'options = {"iterations_per_loop": 0}\noptions["iterations_per_loop"] = 10\n'
    folder_with(tmp_path, f"from npu_bridge.npu_init import *\n{changed}config = NPURunConfig(**options)\n")
    code, output = checked(tmp_path)
    assert code == 0, output
