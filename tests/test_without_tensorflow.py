"""Without TensorFlow, or beside another version: one sentence says what to install, and plans still work."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from npu_bridge.base.after_import import call_after_import
from npu_bridge.base.tf_internals.names import KERAS

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
# The packages of `pip install .`, with their own requirements.
INSTALLED = ("click", "markdown_it", "mdurl", "numpy", "pygments", "rich", "tomli")
VERSION = "2.15" if sys.version_info < (3, 12) else "2.21"
INSTALL = f"Install it: pip install 'tensorflow-cpu=={VERSION}.*', or 'tensorflow=={VERSION}.*' for GPUs."
MISSING = f"ModuleNotFoundError: npu_bridge: TensorFlow is not installed. Expected 2.15 to 2.21; got none. {INSTALL}"
OTHER = f"ImportError: npu_bridge: TensorFlow has an unsupported version. Expected 2.15 to 2.21; got 2.22.0. {INSTALL}"
APART = "ImportError: npu_bridge: TensorFlow 2.18.1 has no Estimator and no Keras 2 of its own. Install them: "
APART += "pip install --no-deps tensorflow-estimator==2.15.* tf-keras==2.18.*"
DOORS = (
    "import npu_bridge.npu_init",
    "from npu_bridge.estimator.npu.npu_config import NPURunConfig",
    "from npu_bridge.reporting import ProgressHook",
    "from npu_bridge.hccl import hccl_ops",
    "import npu_bridge.tf_adapter",
    "import hccl.manage.api",
)
# Each statement fails by itself; the last words of the exception are printed.
TRY_ALL = """
import sys, traceback
for statement in sys.argv[1:]:
    try:
        exec(statement)
    except ImportError as error:
        print(traceback.format_exception_only(type(error), error)[-1].strip())
    else:
        print("imported")
"""


@pytest.fixture
def python(tmp_path):
    """Runs this Python with nothing installed but what the package itself needs; gives what it prints, as lines."""
    for name in INSTALLED:
        spec = importlib.util.find_spec(name)
        if spec is not None:
            package = pathlib.Path(spec.origin).parent
            libraries = package.with_name(f"{name}.libs")
            for path in (package, libraries) if libraries.exists() else (package,):
                (tmp_path / path.name).symlink_to(path)

    def run(*arguments):
        path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(REPOSITORY)!r}]; "
        if arguments[0] == "-c":
            arguments = ("-c", path + f"exec({arguments[1]!r})", *arguments[2:])
        done = subprocess.run([sys.executable, "-S", *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_every_door_says_what_to_install(python):
    assert python("-c", TRY_ALL, *DOORS) == [MISSING] * len(DOORS)
    # Code that works without TensorFlow finds this out as usual.
    unexplained = "ModuleNotFoundError: No module named 'tensorflow'"
    assert python("-c", TRY_ALL, "import npu_bridge", "import tensorflow") == ["imported", unexplained]
    find = "import npu_bridge, importlib.util as u; print(u.find_spec('tensorflow'))"
    assert python("-c", find) == ["None"]


def test_a_plan_needs_none(python):
    plan = ["plan", "--params", "110M", "--bandwidth", "1Gbit", "--compute-secs", "0.2", "--ranks", "1,2"]
    code = f"import sys; sys.argv = ['npu-run', *{plan!r}]; from npu_run.cli import main; main()"
    assert any("efficiency" in line for line in python("-c", code))


def test_a_page_of_a_training_needs_none(python, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "history.jsonl").write_text(
        '{"start": 0, "time": 1.0, "ranks": 2}\n'
        '{"step": 1, "loss": 2.5, "loss_scale": null, "skipped": false, "time": 2.0}\n'
    )
    code = f"import sys; sys.argv = ['npu-run', 'report', {str(run)!r}]; from npu_run.cli import main; main()"
    (said,) = python("-c", code)
    assert "report.html (" in said and said.endswith(" kB)")
    assert 'data-last-step="1"' in (run / "report.html").read_text()


@pytest.mark.parametrize("version, text", [("2.22.0", OTHER), ("2.18.1", APART)])
def test_another_version_is_refused_by_every_door_and_by_nobody_else(python, tmp_path, version, text):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text(f"__version__ = '{version}'\n")
    for first in ((), ("import tensorflow",), ("import npu_bridge", "import tensorflow")):
        lines = python("-c", TRY_ALL, *first, *DOORS)
        assert lines[: len(first)] == ["imported"] * len(first)
        assert lines[len(first) :] == [text] * len(DOORS)


@pytest.mark.parametrize("tensorflow, is_refused", [("2.15.1", True), ("2.17.1", True), ("2.18.0", False)])
def test_numpy_2_is_refused_beside_a_tensorflow_that_was_built_for_the_one_before(
    python, tmp_path, tensorflow, is_refused
):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise ImportError('this one was tried')\n")
    for name, version in (("tensorflow_cpu", tensorflow), ("numpy", "2.1.3")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    text = f"numpy has an unsupported version. Expected a version before 2 for TensorFlow {tensorflow}; got 2.1.3."
    said = f"ImportError: npu_bridge: {text} Install it: pip install 'numpy<2'."
    lines = python("-c", TRY_ALL, *DOORS)
    assert lines == [said if is_refused else "ImportError: this one was tried"] * len(DOORS)


@pytest.mark.slow("copies an environment")
def test_a_path_that_the_locale_cannot_read_is_told(tmp_path):
    spec = importlib.util.find_spec("tensorflow")
    folder = tmp_path / "mit Lücke"
    folder.mkdir()
    (folder / "tensorflow").symlink_to(pathlib.Path(spec.origin).parent)
    said = {}
    for choice in ("0", "1"):
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{REPOSITORY}"}
        environment |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": choice}
        command = [sys.executable, "-c", "import npu_bridge.npu_init"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=300)
        said[choice] = done.stderr.decode(errors="replace").splitlines()[-1:]
    problem = (
        "ImportError: npu_bridge: the path of TensorFlow cannot be decoded. Expected ASCII, or UTF-8 in a UTF-8 locale"
    )
    assert said["0"][0].startswith(f"{problem}; got {tmp_path}/mit L") and said["1"] == []


def test_a_machine_without_proc_is_told():
    code = 'mount -t tmpfs none /proc && exec "$@"'
    apart = ["unshare", "--mount", "sh", "-c", code, "sh"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here, which takes root and unshare")
    command = [*apart, sys.executable, "-c", "import npu_bridge.npu_init"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    problem = (
        "npu_bridge: TensorFlow crashes without /proc. Expected a mounted /proc; got none. Run mount -t proc proc /proc"
    )
    assert done.stderr.splitlines()[-1] == f"ImportError: {problem}"


@pytest.mark.skipif(KERAS == "keras", reason="tf.keras is Keras 2 in this TensorFlow")
@pytest.mark.parametrize(
    "choice, first, cause",
    [
        (None, "tf.keras.layers", "it was used before npu_bridge was imported"),
        ("0", "", "TF_USE_LEGACY_KERAS is '0'"),
        (None, "", None),
        ("1", "tf.keras.layers", None),
        (None, "import keras", None),
    ],
)
def test_keras_3_under_the_name_of_keras_2_is_refused(choice, first, cause):
    code = f"import tensorflow as tf\n{first}\nimport npu_bridge.npu_init\nprint(tf.keras.__name__)"
    environment = {name: text for name, text in os.environ.items() if name != "TF_USE_LEGACY_KERAS"}
    environment |= {} if choice is None else {"TF_USE_LEGACY_KERAS": choice}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    if cause is None:
        assert done.returncode == 0 and done.stdout.startswith("tf_keras."), done.stderr
    else:
        said = f"ImportError: npu_bridge: tf.keras is Keras 3, because {cause}. Expected Keras 2 as tf.keras; "
        assert done.stderr.splitlines()[-1].startswith(said)


@pytest.mark.slow("a start of TensorFlow for each form of import")
@pytest.mark.parametrize("first", ["import npu_bridge", "import npu_device", "import tensorflow, npu_bridge.npu_init"])
def test_modules_below_tf_keras_are_of_keras_2(first):
    code = f"{first}\nimport tensorflow\nfrom tensorflow.keras.layers import Dense\nprint(Dense.__module__)"
    environment = {name: text for name, text in os.environ.items() if name != "TF_USE_LEGACY_KERAS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith(f"{KERAS}."), done.stdout + done.stderr


@pytest.mark.skipif(KERAS == "keras", reason="TensorFlow 2.15 greets at a level that is set")
def test_tensorflow_does_not_greet_and_other_lines_stay():
    code = "import os, npu_bridge\nimport tensorflow\nos.write(2, b'last')"
    environment = {name: text for name, text in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    said = {}
    for verbose in ("0", "1"):
        command = [sys.executable, "-X", "importtime", "-c", code]
        changed = {**environment, "NPU_BRIDGE_VERBOSE": verbose}
        done = subprocess.run(command, cwd=REPOSITORY, env=changed, capture_output=True, text=True, timeout=300)
        said[verbose] = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
        assert " tensorflow\n" in done.stderr and done.returncode == 0  # a line of Python itself, while it is loaded
    assert said["0"] == ["last"]
    assert any("oneDNN" in line or "cpu_feature_guard" in line for line in said["1"])


def test_of_tensorflow_only_greetings_and_the_absence_of_a_driver_are_hidden():
    """The lines are those of TensorFlow 2.21 for GPUs on a machine without one; some processors are not greeted."""
    hidden = [
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "I0000 00:00:1795902224.578370    4106 cpu_feature_guard.cc:227] This TensorFlow binary is optimized",
        "I0000 00:00:1795902213.293730    4066 cudart_stub.cc:31] Could not find cuda drivers on your machine",
        "E0000 00:00:1795902220.940612    4066 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error",
    ]
    shown = ["E0000 00:00:1795902220.940612    4066 cuda_blas.cc:52] an error of CUDA", "a line of a script"]
    text = "\n".join([*hidden, *shown])
    code = (
        "import os; from npu_bridge.base import tensorflow_start as start\n"
        f"with start._hide_stderr_lines(start._GREETING, start._NO_DRIVER): os.write(2, {text!r}.encode())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.stderr.splitlines() == shown


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
def test_lines_that_cannot_be_written_do_not_make_an_import_fail():
    code = (
        "import os; from npu_bridge.base import tensorflow_start as start\n"
        "with start._hide_stderr_lines(): os.write(2, b'a line'); os.write(2, b'another')"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, stderr=full, timeout=300)
    assert done.returncode == 0


def test_a_hook_on_an_import_disturbs_no_import_of_another_thread(monkeypatch, tmp_path):
    changed = []
    (tmp_path / "hooked.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    call_after_import("hooked", changed.append)
    before, finders = sys.meta_path, list(sys.meta_path)
    assert changed == [importlib.import_module("hooked")]
    assert before == finders, "another thread can be in the middle of this list"
    assert sys.meta_path == finders[1:]
    del sys.modules["hooked"]
