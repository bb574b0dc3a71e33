"""Without TensorFlow, or beside another version: one sentence that says what to install, and plans all the same."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
# What `pip install .` brings, with what these packages need themselves.
INSTALLED = ("click", "markdown_it", "mdurl", "numpy", "pygments", "rich", "tomli")
VERSION = "2.15" if sys.version_info < (3, 12) else "2.21"
INSTALL = f"Install it: pip install 'tensorflow-cpu=={VERSION}.*', or 'tensorflow=={VERSION}.*' for GPUs."
MISSING = f"ModuleNotFoundError: npu_bridge: TensorFlow is not installed. Expected 2.15 to 2.21; got none. {INSTALL}"
OTHER = f"ImportError: npu_bridge: TensorFlow is of another version. Expected 2.15 to 2.21; got 2.22.0. {INSTALL}"
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
    # Whoever can do without finds out as ever.
    unexplained = "ModuleNotFoundError: No module named 'tensorflow'"
    assert python("-c", TRY_ALL, "import npu_bridge", "import tensorflow") == ["imported", unexplained]
    find = "import npu_bridge, importlib.util as u; print(u.find_spec('tensorflow'))"
    assert python("-c", find) == ["None"]


def test_a_plan_needs_none(python):
    plan = ["plan", "--params", "110M", "--bandwidth", "1Gbit", "--compute-secs", "0.2", "--ranks", "1,2"]
    code = f"import sys; sys.argv = ['npu-run', *{plan!r}]; from npu_bridge.launch.cli import main; main()"
    assert any("efficiency" in line for line in python("-c", code))


def test_a_page_of_a_training_needs_none(python, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "history.jsonl").write_text(
        '{"start": 0, "time": 1.0, "ranks": 2}\n'
        '{"step": 1, "loss": 2.5, "loss_scale": null, "skipped": false, "time": 2.0}\n'
    )
    code = f"import sys; sys.argv = ['npu-run', 'report', {str(run)!r}]; from npu_bridge.launch.cli import main; main()"
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
