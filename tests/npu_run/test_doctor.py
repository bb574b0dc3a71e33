"""The doctor: on this machine as it is, and on broken ones made of fake packages put in front of the real ones."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import click
import pytest
from rich.console import Console

from npu_run.doctor.build import _BEFORE_SOURCES, Installer, InstallError, _make_build_environment, cache_folder
from npu_run.doctor.command import machine_section, versions_section
from npu_run.doctor.options import config_section, environment_section, rank_table_section
from npu_run.doctor.page import DoctorPage, FoundProblem, PageSection, print_page
from npu_run.doctor.ranks import TrialResult, horovod_section
from tests.npu_run.launching import LIMIT_SECS, ROOT, finish, needs_horovod, npu_run, start, write_script
from tests.npu_run.test_hosts import clean_environment, write_table  # noqa: F401
from tests.small_disk import small_disk  # noqa: F401 - a fixture

CONFIG = """
save_checkpoints_steps = 7
precision_mode = "allow_mix_precision"

[dump_config]
enable_dump_debug = true
dump_path = "."
dump_debug_mode = "all"
"""


def row(output, name):
    """The row of the page that starts with a name, its cells joined by single spaces."""
    (found,) = [" ".join(line.split()) for line in output.splitlines() if line.startswith(f"  {name} ")]
    return found


def with_package(folder, name, text):
    """A PYTHONPATH on which a fake package comes before the real one."""
    write_script(folder, text, f"fake/{name}/__init__.py")
    return os.pathsep.join([str(folder / "fake"), str(ROOT)])


@needs_horovod
@pytest.mark.ranks(2)
def test_healthy_machine(tmp_path):
    write_table(tmp_path, [("127.0.0.1", [(0, 0)]), ("192.0.2.7", [(1, 3)])])
    (tmp_path / "run.toml").write_text(CONFIG)
    # Variables that make this process look like one rank of two must not disturb the trial.
    variables = {"RANK_SIZE": "2", "RANK_ID": "1", "JOB_ID": "nightly"}
    options = ["--config", "run.toml", "--rank-table", "table.json", "--limit-secs", LIMIT_SECS]
    code, output = finish(start("doctor", *options, cwd=tmp_path, **variables))
    assert code == 0
    assert output.splitlines()[-1] == "A run works here."
    for stage in ("import tensorflow", "read run.toml", "sum on 2 ranks"):
        assert re.search(rf"^npu-run doctor: checking {stage} \.\.\. \d+\.\d s$", output, re.MULTILINE)
    assert "0.28.1, built with gloo" in output
    assert row(output, "controller") == "controller gloo"
    assert row(output, "sum on 1 rank").startswith("sum on 1 rank right, after")
    assert row(output, "sum on 2 ranks").startswith("sum on 2 ranks right, after")
    assert row(output, "JOB_ID").startswith("JOB_ID nightly works")
    assert row(output, "192.0.2.7") == "192.0.2.7 1 slots ranks 1 devices 3 remote"
    assert row(output, "NPURunConfig.save_checkpoints_steps").startswith(
        "NPURunConfig.save_checkpoints_steps 7 default 100 works"
    )
    assert "DumpConfig.enable_dump_debug" in output
    assert "\x1b" not in output


def test_broken_horovod_is_told_with_its_fix(tmp_path):
    path = with_package(tmp_path, "horovod", "raise ImportError('libtensorflow.so: undefined symbol: _Z3abc')")
    code, output = npu_run("doctor", "--limit-secs", LIMIT_SECS, cwd=tmp_path, PYTHONPATH=path)
    assert code == 1
    assert "problem 1: Horovod does not work: import horovod.tensorflow: ImportError: libtensorflow.so" in output
    assert "pip install --no-cache-dir --no-build-isolation horovod==0.28.1" in output
    assert row(output, "GPUs")
    assert output.splitlines()[-1] == "A run could not work: 1 problem to fix."


def environment_without_horovod(folder):
    """A Python with links to the packages of this one, but Horovod. Its pip can fetch nothing, so it changes none."""
    venv.create(folder, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    for entry in Path(click.__file__).parent.parent.iterdir():
        if not entry.name.startswith(("horovod", "__pycache__", "npu_bridge", "__editable__")):
            with contextlib.suppress(FileExistsError):
                (own / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def kept_wheels():
    return sorted(cache_folder().glob(f"wheels/python{sys.version_info[0]}.{sys.version_info[1]}-*/horovod-*.whl"))


@pytest.mark.slow("makes an environment")
@pytest.mark.skipif(not kept_wheels(), reason="no wheel of Horovod is kept here")
def test_missing_horovod_is_installed_from_the_wheel_that_is_kept(tmp_path):
    python = environment_without_horovod(tmp_path / "venv")
    kept = tmp_path / "cache" / "npu_bridge" / "wheels"
    kept.parent.mkdir(parents=True)
    kept.symlink_to(cache_folder() / "wheels")
    variables = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        [python, "-m", "npu_bridge.run", "doctor", "--fix", "--limit-secs", str(LIMIT_SECS)],
        env={**os.environ, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not installed" in done.stdout and "npu-run doctor --fix; or by hand" in done.stdout
    said = [line.partition("npu-run doctor: ")[2] for line in done.stderr.splitlines()]
    said = [line for line in said if not line.startswith("    ")]  # how long a command has taken so far
    installed = said[[line.startswith("installing Horovod into ") for line in said].index(True) + 1 :]
    assert installed[0] == "what Horovod is built with" and installed[1].startswith("Horovod, compiled earlier (")
    assert installed[2].startswith("Horovod works. Next: npu-run doctor, ") and len(installed) == 3
    assert "Successfully installed horovod-0.28.1" in (tmp_path / "cache" / "npu_bridge" / "horovod.log").read_text()
    assert list((tmp_path / "venv").glob("lib/python*/site-packages/horovod/tensorflow"))


def write_program(path, text=""):
    """Writes a shell script, with its folder; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_what_is_missing_for_compiling_is_told(tmp_path, monkeypatch):
    said = []
    tools = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    write_program(tools / "cmake")
    python = write_program(tools / "python")  # of an environment where pip has nothing to do
    installer = Installer(str(python), tmp_path / "log", said.append)
    with pytest.raises(InstallError, match="for which a C.. compiler must be installed: apt-get install g"):
        installer.install_horovod()
    write_program(tools / "c++")
    write_program(python, 'case "$3" in wheel) echo "[ 40%] no"; exit 1;; esac')
    with pytest.raises(InstallError, match="could not be compiled"):
        installer.install_horovod()
    assert installer.last_lines().endswith("[ 40%] no") and said[-1].startswith("Horovod, compiled here")


FULL = ", and the disk of {} has little room. Expected {} GB; got 0.00 GB. If that is the cause, {}"


def test_a_full_disk_is_named_where_an_installation_fails(tmp_path, small_disk, monkeypatch):  # noqa: F811
    python = write_program(tmp_path / "venv" / "bin" / "python", "exit 1")
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is looked for once
    monkeypatch.setenv("TMPDIR", str(small_disk.path))
    with pytest.raises(InstallError) as failed:
        Installer(str(python), tmp_path / "log", print).install_horovod()
    fix = "name a folder with room for temporary files: TMPDIR=/path"
    assert str(failed.value) == f"pip install failed{FULL.format(small_disk.path, 1, fix)}"
    assert failed.value.is_explained
    environment = shutil.copytree(tmp_path / "venv", small_disk.path / "venv")
    small_disk.fill()
    installer = Installer(str(environment / "bin" / "python"), environment / "log", print)
    with pytest.raises(InstallError) as failed:
        installer.install_horovod()
    lack = FULL.format(environment, 2.5, "make room there")
    assert str(failed.value) == f"the log cannot be written: No space left on device{lack}"


def pretend_to_compile(monkeypatch, folder, python, does):
    """Writes a Python and compilers that do something in place of compiling Horovod."""
    write_program(python, f'case "$*" in *horovod==*) {does};; esac')
    for name in ("c++", "cmake"):
        (folder / name).symlink_to(python)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_a_wheel_that_cannot_be_kept_is_installed(tmp_path, small_disk, monkeypatch):  # noqa: F811
    python = tmp_path / "python"
    pretend_to_compile(monkeypatch, tmp_path, python, 'printf %9999s > "$9/horovod-0.whl"')
    said = []
    for folder in (tmp_path, small_disk.path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        small_disk.fill()
        Installer(str(python), tmp_path / "log", said.append).install_horovod()
    assert len(list(tmp_path.glob("npu_bridge/wheels/*/horovod-0.whl"))) == 1
    told = "the wheel of Horovod for the next time is not written any more: No space left on device; "
    assert [line for line in said if "next time" in line] == [f"{told}the rest continues without it"]


def test_make_and_compilers_see_no_space_in_the_path_of_an_environment(tmp_path, monkeypatch):
    python = tmp_path / "mit Lücke" / "bin" / "python"
    pretend_to_compile(monkeypatch, tmp_path, python, 'echo "built by $0"; touch "$9/horovod-0.whl"')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Installer(str(python), tmp_path / "log", print).install_horovod()
    (builder,) = re.findall("built by (.*)", (tmp_path / "log").read_text())
    assert builder.endswith("/environment/bin/python") and " " not in builder
    assert python.exists()


def test_an_installation_that_is_interrupted_ends_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr("npu_run.doctor.build._HEARTBEAT_SECS", 0.01)

    def interrupt(line):
        raise KeyboardInterrupt

    goes_on = tmp_path / "goes_on"
    command = [sys.executable, "-c", f"import time\ntime.sleep(10)\nopen({str(goes_on)!r}, 'w')"]
    with pytest.raises(KeyboardInterrupt):
        Installer(sys.executable, tmp_path / "log", interrupt).run(command)
    assert not goes_on.exists()


def test_a_user_without_a_home_has_a_place_for_wheels(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", f"{tmp_path}/none")
    assert cache_folder() == Path(sys.prefix, "npu_bridge_cache")


def test_a_user_whom_the_system_does_not_know_has_one_too(tmp_path):
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")  # one that other users may run
    if os.getuid() != 0 or python is None or shutil.which("setpriv") is None:
        pytest.skip("another user's process takes root, setpriv and a python3 of the system")
    code = "import sys; from npu_run.doctor.build import cache_folder; print(cache_folder(), sys.prefix)"
    other = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", "env", "-u", "HOME"]
    names = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([*other, python, "-c", code], env=names, cwd="/", capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in ran.stderr:
        pytest.skip("other users cannot read this folder")
    folder, prefix = ran.stdout.split()
    assert folder == f"{prefix}/npu_bridge_cache"


def test_tensorflow_that_kills_the_process_does_not_kill_the_doctor(tmp_path):
    (tmp_path / "run.toml").write_text(CONFIG)
    path = with_package(tmp_path, "tensorflow", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    code, output = npu_run("doctor", "--config", "run.toml", "--limit-secs", LIMIT_SECS, cwd=tmp_path, PYTHONPATH=path)
    assert code == 1
    assert "TensorFlow does not work: import tensorflow: killed by SIGSEGV" in output
    assert "run.toml was not read: that needs TensorFlow" in output
    assert row(output, "GPUs") == "GPUs unknown"


def test_tensorflow_that_is_missing(tmp_path):
    path = with_package(tmp_path, "tensorflow", "raise ModuleNotFoundError(\"No module named 'tensorflow'\")")
    code, output = npu_run("doctor", "--limit-secs", LIMIT_SECS, cwd=tmp_path, PYTHONPATH=path)
    assert code == 1
    assert "No module named 'tensorflow'" in output
    version = "2.15" if sys.version_info < (3, 12) else "2.21"
    assert f"fix: pip install 'tensorflow-cpu=={version}.*'" in output


@pytest.mark.parametrize("tensorflow, fits", [("2.15.1", False), ("2.18.0", True)])
def test_numpy_of_the_wrong_side_is_a_problem(tmp_path, monkeypatch, tensorflow, fits):
    for name, version in (("tensorflow", tensorflow), ("numpy", "2.1.3")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = [problem for problem in versions_section()[1] if "numpy" in problem.what]
    assert [problem.fix for problem in found] == ([] if fits else ["pip install 'numpy<2'"])


@pytest.mark.slow("waits for what hangs")
def test_what_hangs_is_cut_short(tmp_path):
    path = with_package(tmp_path, "tensorflow", "import time\ntime.sleep(600)")
    code, output = npu_run("doctor", "--limit-secs", "4", cwd=tmp_path, PYTHONPATH=path)
    assert code == 1
    assert "TensorFlow does not work: no end within 4 s, during: " in output


def test_missing_horovod_matters_only_to_several_machines():
    facts = {"tensorflow": "2.15.1", "horovod_is_missing": True}
    one, two = (
        TrialResult(1, facts, "", 1.0),
        TrialResult(2, {**facts, "controller": "grpc", "millisecs": [1.25, 9.5]}, "", 1.0),
    )
    section, (note,) = horovod_section(one, two)
    assert ("horovod", "not installed") in section.rows
    assert ("transfers", "a number in 1.2 ms, 4 MiB in 10 ms, by TensorFlow's own collectives") in section.rows
    assert not note.is_fatal and "pip install" in note.fix


def test_two_ranks_that_cannot_sum_are_a_problem():
    facts = {"tensorflow": "2.15.1", "horovod": "0.28.1", "built": ["gloo"], "controller": "gloo", "size": 1}
    one, two = TrialResult(1, facts, "", 1.0), TrialResult(2, {}, "start: no network interface", 1.0)
    section, (problem,) = horovod_section(one, two)
    assert ("sum on 2 ranks", "failed: start: no network interface") in section.rows
    assert problem.is_fatal


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("iterations_per_loop = 1\nprecision_mod = 'x'\n", [":2: key precision_mod", "'precision_mode'"]),
        ("compress_weight_conf = 'weights.conf'\n", [":1"]),  # an option that is refused
    ],
)
def test_wrong_configuration_file_names_file_and_line(tmp_path, text, parts):
    file = tmp_path / "run.toml"
    file.write_text(text)
    section, (problem,) = config_section(str(file))
    assert not section.rows
    assert problem.is_fatal
    assert problem.what.startswith(f"{file}{parts[0]}") and all(part in problem.what for part in parts)


def test_configuration_file_of_defaults_changes_nothing(tmp_path):
    (tmp_path / "run.toml").write_text("iterations_per_loop = 1\n")
    section, problems = config_section(str(tmp_path / "run.toml"))
    assert (section.rows, problems) == ([("nothing",)], [])


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        ({"RANK_SIZE": "2", "CM_WORKER_SIZE": "2"}, ["describe the cluster twice", "both set"]),
        ({"RANK_ID": "one"}, ["RANK_ID is not a whole number"]),
        ({"ASCEND_DEVICE_ID": "-1"}, ["ASCEND_DEVICE_ID is not a whole number"]),
        ({"TF_CONFIG": "[]"}, ["TF_CONFIG does not describe a cluster"]),
        ({"RANK_TABLE_FILE": "missing.json"}, ["rank table missing.json: it cannot be read"]),
    ],
)
def test_environment_that_contradicts_itself(monkeypatch, variables, parts):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    section, problems = environment_section()
    assert [problem.is_fatal for problem in problems] == [True] * len(parts)
    assert all(part in problem.what for part, problem in zip(parts, problems))
    assert set(variables) <= {name for name, *_ in section.rows}


def test_declared_ranks_are_noted(monkeypatch):
    monkeypatch.setenv("RANK_SIZE", "4")
    _, (note,) = environment_section()
    assert not note.is_fatal and "npu-run -np 4" in note.fix


def test_wrong_rank_table_is_a_problem(tmp_path):
    path = write_table(tmp_path, [("127.0.0.1", [(0, 0), (2, 1)])])
    section, (problem,) = rank_table_section(path)
    assert section.rows == []
    assert problem.is_fatal and "rank ids are not consecutive" in problem.what


def test_features_that_decide_precision():
    described = "model name\t: Some CPU\nflags\t\t: fpu avx2 avx512f amx_bf16 amx_tile\n"
    rows = dict(machine_section(["A GPU"], described).rows)
    assert (rows["processor"], rows["AVX2"], rows["AVX512_BF16"], rows["AMX_BF16"]) == ("Some CPU", "yes", "no", "yes")
    assert rows["bfloat16"] == "in hardware (AMX_BF16)"
    assert rows["float16"].startswith("not in hardware")
    assert rows["GPUs"] == "A GPU"
    assert dict(machine_section([], "").rows)["features"].startswith("unknown")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_page(is_terminal):
    page = DoctorPage()
    page.add(
        PageSection("title", [("short", "1"), ("much longer", "2 [bold]")], "versions"),
        [FoundProblem("a note", "a fix", False)],
    )
    page.add(PageSection("empty", []), [FoundProblem("a problem")])
    stream = io.StringIO()
    print_page(page, Console(file=stream, force_terminal=is_terminal, highlight=False, width=70))
    output = stream.getvalue()
    assert "empty" not in output
    assert output.index("problem 1: a problem") < output.index("note 2: a note") < output.index("fix: a fix")
    assert "A run could not work: 1 problem to fix." in output
    assert "2 [bold]" in output
    if not is_terminal:
        assert output.splitlines()[:3] == ["title", "  short        1", "  much longer  2 [bold]"]
    assert page.exit_code == 1
    print_page(page, Console(file=(short := io.StringIO()), highlight=False), is_short=True)
    assert "title" not in short.getvalue() and "a problem" in short.getvalue()
    assert page.make_json_facts() == {
        "versions": [{"name": "short", "value": "1"}, {"name": "much longer", "value": "2 [bold]"}],
        "problems": [
            {"what": "a note", "fix": "a fix", "is_fatal": False},
            {"what": "a problem", "fix": "", "is_fatal": True},
        ],
    }


def test_a_problem_that_quotes_an_earlier_one_is_not_told_twice_and_notes_fail_no_run():
    page, cause = DoctorPage(), FoundProblem("TensorFlow 2.21.0 has no Keras 2", "pip install tf-keras")
    page.add(PageSection("versions", [("a", "b")]), [cause])
    page.add(
        PageSection("ranks", []),
        [FoundProblem(f"TensorFlow does not work: ImportError: {cause.what}", "pip install x")],
    )
    assert page.problems == [cause]
    page = DoctorPage(problems=[FoundProblem("a note", is_fatal=False)])
    assert (page.exit_code, page.verdict) == (0, "A run works here.")


@pytest.mark.parametrize("is_there", [True, False], ids=["2.15", "later"])
def test_headers_that_are_elsewhere_are_led_to(tmp_path, is_there):
    include, built = tmp_path / "include", tmp_path / "built"
    asked_for = "tensorflow/compiler/xla/client/xla_builder.h"
    for name in ("xla/hlo/builder/xla_builder.h", "external/highwayhash/hash.h", *[asked_for] * is_there):
        (include / name).parent.mkdir(parents=True)
        (include / name).touch()
    python = write_program(tmp_path / "python", f"echo {include}")
    folders = Installer(str(python), tmp_path / "log", print)._extra_header_folders(built)
    if is_there:
        assert folders == []
    else:
        assert folders == [str(built / "include"), str(include / "external/highwayhash")]
        assert (built / "include" / asked_for).read_text() == '#include "xla/hlo/builder/xla_builder.h"\n'


def test_headers_that_later_compilers_no_longer_include_are_asked_for(monkeypatch):
    monkeypatch.setenv("CXXFLAGS", "-O1")
    found = _make_build_environment([], Path("folder/before.h"))
    assert found["CXXFLAGS"] == '-include "folder/before.h" -O1'
    assert "CPLUS_INCLUDE_PATH" not in found


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler is installed")
@pytest.mark.parametrize("version", ["14", "1"], ids=["this compiler", "as for g++ 14"])
def test_what_is_read_before_sources_compiles(tmp_path, version):
    """With it, sources get a `span` of the standard library, whichever compiler there is."""
    assert "__GNUC__ >= 14" in _BEFORE_SOURCES
    (tmp_path / "before.h").write_text(_BEFORE_SOURCES.replace("__GNUC__ >= 14", f"__GNUC__ >= {version}"))
    asks = "#ifdef FLATBUFFERS_USE_STD_SPAN\nstd::span<char> f(char* p) { return std::span<char>(p, 2); }\n#endif\n"
    (tmp_path / "source.cc").write_text(f'{asks}int main() {{ throw std::logic_error("no"); }}\n')
    command = ["c++", "-w", "-std=c++17", "-include", "before.h", "-c", "source.cc"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
