"""Every command that a page shows: run by another test, run here unchanged, or refused by no parser.

Pages are the README, CONTRIBUTING, those of docs/ and of the examples. A new command fails here until it is in one of
the tables below; so does a row whose command is gone from the pages.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from npu_bridge.base.output_folders import claim_output_folder
from npu_run import cli
from npu_run.outputs import MADE_BY
from tests.examples.commands import run_warm
from tests.npu_run.launching import needs_horovod
from tests.reporting.test_page import write_history

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/README.md")]
PROGRAMS = ("make", "npu-run", "python", "pip", "horovodrun", "mpirun", "srun", "kubectl")
SCRIPT = re.compile(r"[\w./-]+\.py")
LIMIT_SECS = 300

# Command: the test file that runs it, perhaps with a smaller model or other hosts, and what stands there.
RUN_BY_OTHER_TESTS = {
    "make train": ("journeys/test_readme.py", ['"make", "train", "RANKS=2"']),
    "make venv": ("journeys/test_setup.py", ['machine.make("venv")']),
    "npu-run -np 2 train.py": ("journeys/test_code_of_pages.py", ['["npu-run", "-np", "2"]', '[*command, "train.py"]']),
    "npu-run -H host1:4,host2:4 train.py": ("npu_run/test_remote_ranks.py", ['"-H", f"{ONE}:1,{OTHER}:1", "train.py"']),
    "npu-run doctor": ("npu_run/test_doctor.py", ['start("doctor", *options']),
    "npu-run doctor --fix": ("npu_run/test_doctor.py", ['"npu_bridge.run", "doctor", "--fix"']),
    "npu-run doctor --config run.toml --rank-table table.json": (
        "npu_run/test_doctor.py",
        ['"--config", "run.toml", "--rank-table", "table.json"'],
    ),
    "npu-run explain --ranks 4 --params 110M --out stages.svg configs/stages.toml": (
        "gradients/test_stages_from_config.py",
        ["^npu-run explain (.*)$"],
    ),
    "npu-run compare out/here/dump out/npu/dump --only tensors": (
        "npu_run/compare/test_command.py",
        ['tmp_path / "dump", tmp_path / "named", "--only", "tensors"'],
    ),
    "npu-run compare out/here/dump --write-names out/named": (
        "npu_run/compare/test_command.py",
        ['tmp_path / "dump", "--write-names", tmp_path / "named"'],
    ),
    "npu-run -np 2 --timeline 20:25 train.py": ("npu_run/test_timeline.py", ['"-np", "2", "--timeline", "3:5"']),
    "npu-run record train.py": (
        "npu_run/trials/test_record.py",
        ['command(record, *options, "--steps", steps, "train.py", *arguments)'],
    ),
    "npu-run record --steps 5 --out recorded train.py": (
        "npu_run/trials/test_record.py",
        ['command(record, *options, "--steps", steps, "train.py", *arguments)'],
    ),
    "npu-run replay recorded train.py": (
        "npu_run/trials/test_record.py",
        ['command(replay, "recorded", "train.py", 2)'],
    ),
    "npu-run bisect --low allow_mix_precision --steps 20 train.py": (
        "npu_run/trials/test_bisect.py",
        ['"--low", "allow_mix_precision", "--steps", "3", "train.py"'],
    ),
    "npu-run check --json train.py": ("npu_run/test_check.py", ['"--json"']),
    "npu-run check --run --out r.json train.py": (
        "npu_run/test_check.py",
        ['["check", "--run", "--out", "report.json", "train.py"]'],
    ),
    "npu-run check train.py": (
        "npu_run/test_check.py",
        ['CliRunner().invoke(check, [*options, str(tmp_path / "train.py")])'],
    ),
    "npu-run -np 2 --set iterations_per_loop=10 --set precision_mode_v2=origin train.py": (
        "npu_run/test_try.py",
        ['words = ("--set", "save_checkpoints_steps=7", "--set", "precision_mode_v2=origin")'],
    ),
    "python tools/replay_on_genuine.py --out compared train.py": (
        "tensorflow1_compat/test_whole_scripts.py",
        ['"tools/replay_on_genuine.py", "--out"'],
    ),
    "npu-run effects --json run.toml": ("npu_run/test_effects.py", ['"--json", "run.toml"']),
    "npu-run effects run.toml": ("npu_run/test_effects.py", ['run("run.toml")']),
    "python examples/accelerate/train.py": ("journeys/test_first_minutes.py", ['"accelerate/train.py"']),
    "python examples/accelerate/train.py --low bfloat16 --ratio 0.5": ("examples/test_accelerate.py", None),
    "python examples/accelerate/train.py --way loss --target_loss 0.9 --ratio 1.2": (
        "examples/test_accelerate.py",
        None,
    ),
    "python examples/bert_pretrain/train.py --num_train_steps 50": (
        "examples/test_bert_train.py",
        ['EXAMPLE / "train.py"', '"--num_train_steps=6"'],
    ),
    # Started by `make train`, as the dry run below shows.
    "npu-run -np 2 examples/bert_pretrain/train.py --distributed": ("journeys/test_readme.py", ['"make", "train"']),
    "python examples/boost/train.py": ("examples/test_boost.py", None),
    "python examples/boost/train.py --epochs 2 --out out/boost": (
        "examples/test_boost.py",
        ['"python examples/boost/train.py", "--epochs", 1, "--out"'],
    ),
    "python examples/stages/own_stage.py": ("examples/test_own_stage.py", None),
    "python examples/digits/train_estimator.py": ("journeys/test_first_minutes.py", ['"digits/train_estimator.py"']),
    "npu-run -np 2 examples/digits/train_estimator.py": ("examples/test_digits.py", None),
    "python examples/digits/predict.py": ("examples/test_digits.py", None),
    "python examples/digits/train_session.py": ("examples/test_digits.py", None),
    "python examples/digits/levels.py": ("examples/test_digits.py", None),
    "npu-run -np 2 examples/digits/train_session.py": ("examples/test_digits.py", None),
    "python examples/keras_fit/train.py": ("examples/test_keras_fit.py", None),
    "npu-run -np 2 examples/keras_fit/train.py": ("examples/test_keras_fit.py", None),
    "python examples/keras_fit/train.py --steps 600": ("examples/test_keras_fit.py", ['"--steps", reached + 15']),
    "python examples/keras_fit/recipe.py": (
        "examples/test_keras_fit.py",
        ["npu-run -np 2 examples/keras_fit/recipe.py"],
    ),
    "npu-run -np 2 examples/keras_fit/recipe.py": ("examples/test_keras_fit.py", None),
    "srun --overlap": ("documented/test_guides.py", ["def test_a_way_to_other_hosts_without_ssh"]),
    "exec kubectl": ("documented/test_guides.py", ["def test_a_way_to_other_hosts_without_ssh"]),
}

# Command: lines it prints here, as patterns. `train.py` prints its rank and arguments, and needs no TensorFlow.
RUN_HERE = {
    "npu-run train.py": ["rank 0 of 1 "],
    "npu-run -np 8 train.py": ["rank 0 of 8 "],
    "npu-run -np 4 train.py --batch 32": ["rank 0 of 4 --batch 32", r"\[rank 3\] rank 3 of 4 --batch 32"],
    "npu-run --hostfile hosts train.py": ["rank 0 of 2 ", r"\[rank 1\] rank 1 of 2 "],
    "npu-run --rank-table table.json train.py": ["rank 0 of 2 ", r"\[rank 1\] rank 1 of 2 "],
    "npu-run -np 4 --restarts 3 train.py": ["rank 0 of 4 "],
    # Of the repeats that are there; the next command empties their folder.
    "npu-run compare noise out/npu": ["losses: inside. B stays in the band of A"],
    "npu-run --repeat 3 --vary seed --out noise train.py": [
        r"npu-run: repeat 2, seeds \+ 2, in noise/repeat-2",
        "npu-run: repeats: no losses were seen",
    ],
    "npu-run --repeat 4 --vary order --out noise_order train.py": ["npu-run: repeat 1, TF_ENABLE_ONEDNN_OPTS="],
    "npu-run -np 2 --repeat 3 --vary rounding --out noise_rounding train.py --model_dir {out}": [
        r"rank 0 of 2 --model_dir \S*/noise_rounding/repeat-2",
    ],
    # Four ranks on each of two nodes, of which `scontrol` names this machine alone.
    "#SBATCH --nodes=2": ["rank 0 of 4 ", r"\[rank 3\] rank 3 of 4 "],
    "#SBATCH --requeue --nodes=2": ["rank 0 of 4 ", r"\[rank 3\] rank 3 of 4 "],
    "npu-run -np 4 --restarts 3 --stall-secs 300 train.py": ["rank 0 of 4 "],
    "npu-run -np 4 --min-np 2 train.py": ["rank 0 of 4 "],
    "npu-run --hosts-from ./hosts.sh --min-np 2 --max-np 8 train.py": ["rank 0 of 2 "],
    "npu-run plan --params 110M --bandwidth 10Gbit --latency 50us --ranks 1..64 --compute-secs 0.6": [
        "ranks  sum alone"
    ],
    "npu-run compare out/digits out/again": [r"losses: inside\. A and B have the same loss to the bit in all 3 steps"],
    "npu-run report out/digits": [r"out/digits/report\.html \(\d+ kB\)"],
    "npu-run report out/digits --timeline timeline": [r"out/digits/report\.html \(\d+ kB\)"],
    "horovodrun -np 4 npu-run train.py": [r"\[0\]<stdout>:rank 0 of 4 ", r"\[3\]<stdout>:rank 3 of 4 "],
}

# Examples that no other test runs with these options: command, and what makes it short.
RUN_HERE_SHORTENED = {
    "python examples/keras_fit/train.py --float16": ["--steps", 2],
}

# Command: why it is not run. Its options are given to the program's own parser.
NOT_RUN = {
    "make test": "it is what runs this",
    "make test-all": "it is what runs this",
    "make lint": "checks all files; a job of its own",
    "make docs": "half a minute; test_site.py builds the same site",
    "make dist": "half a minute; test_wheel.py builds the same files",
    "make bench": "minutes of benchmarks",
    "python benchmarks/wire.py": "minutes, and needs root",
    "python benchmarks/gpu.py": "needs a GPU; tests/gpu/test_benchmark.py runs it with small models",
    "make test-gpu": "needs a GPU",
    "make test-gpu ARGS=--on-cpu": "five minutes; .ci/run runs it if there is time",
    "pip install 'tensorflow[and-cuda]==2.21.*' tf-keras": "needs a network",
    "python examples/stages/loss_curves.py --picture loss_curves.svg": "six trainings of 300 steps",
    "make venv-tf115": "installs another TensorFlow",
    "make test-tf115": "installs another TensorFlow; the suite runs the same tests where it is installed",
    "python tools/tensorflow_tests.py tensorflow --python .venv-tf115/bin/python --cache out/tests.json": (
        "needs TensorFlow's sources; tests/tensorflow1_compat/test_tensorflow_tests.py runs it on a few tests"
    ),
    "make test-clusters": "needs root, Slurm, Open MPI and MPICH; the suite runs the same tests where it may",
    "make test-elastic": "hours; test_elastic_matrix.py runs a part of it",
    "make test-hosts": "needs root; the suite runs the same tests where it may",
    "make test-soak": "an hour of faults",
    'make test-soak ARGS="--faults 30 --seed 2 --kinds killed,link"': "minutes of faults",
    'pip install ".[cpu]"': "needs a network",
    'pip install "setuptools<81" wheel cloudpickle packaging psutil pyyaml': "needs a network",
    "HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 "
    "HOROVOD_WITHOUT_MXNET=1 CMAKE_POLICY_VERSION_MINIMUM=3.5 pip install --no-build-isolation horovod==0.28.1": (
        "needs a network and minutes of compiling"
    ),
    "pip install 'npu-bridge[examples]'": "needs a network",
    "srun -n 8 npu-run train.py": "needs Slurm; clusters/test_mpirun.py runs it where it may",
    "mpirun -np 8 npu-run train.py": "needs MPI; clusters/test_mpirun.py runs it where it may",
    "srun npu-run --logs train.py\n": "needs Slurm; clusters/test_mpirun.py runs it where it may",
    "docker build -t registry.example/npu-bridge:latest -f examples/kubernetes/Dockerfile .": "needs Docker",
    "kubectl apply -f examples/kubernetes/storage.yaml": "needs Kubernetes",
    "kubectl apply -f examples/kubernetes/indexed_job.yaml": "needs Kubernetes",
    "horovodrun -np 4 python train.py": "Horovod's launcher alone; the line with npu-run in it is run",
    "mpirun -np 4 -H host1:2,host2:2 python train.py": "needs two machines and MPI",
    "mpirun -np 8 -H host1:4,host2:4 python train.py": "needs two machines and MPI",
    "srun --mpi=pmi2 -n 8 python train.py": "needs Slurm",
    "npu-run -H host1:4,host2:4 --min-np 4 train.py": "needs two machines",
    "kubectl exec -it worker-0 -- npu-run -H worker-0.workers:1,worker-1.workers:1 train.py": "needs Kubernetes",
    "npu-run -np 2 examples/bert_pretrain/train.py --distributed --corpus ~/books --config configs/bert_small.toml "
    "--output_dir out/bert_small": "hours, and books",
}

TRAIN = """
import os, sys
assert "tensorflow" not in sys.modules and not [name for name in os.environ if name.startswith("NPU_RUN_TRIAL")]
print("rank", os.environ["RANK_ID"], "of", os.environ["RANK_SIZE"], *sys.argv[1:], "")
"""
TABLE = """{"version": "1.0", "status": "completed", "server_count": "1", "server_list": [{"server_id": "127.0.0.1",
"device": [{"device_id": "0", "device_ip": "127.0.0.1", "rank_id": "0"},
{"device_id": "1", "device_ip": "127.0.0.1", "rank_id": "1"}]}]}"""


def commands_of(page):
    """The commands of a page's blocks: one for each line, without its comment, or a whole script."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if block.startswith("#!"):
            yield block
            continue
        lines = [re.split(r"\s+#", line)[0].strip() for line in re.sub(r"\\\n\s*", "", block).splitlines()]
        if language in ("sh", "bash", "console") or (not language and program_of(lines[0]) in PROGRAMS):
            yield from filter(None, lines)


def program_of(line):
    return next((word for word in line.split() if not re.match(r"\w+=", word)), "")


def inline_commands_of(page):
    """Commands inside of sentences and tables; upper-case words and dots stand for what the reader fills in."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return [text for text in re.findall(r"`([^`\n]+)`", prose) if " " in text and program_of(text) in PROGRAMS]


TEXTS = [page.read_text(encoding="utf-8") for page in PAGES]
SHOWN = list(dict.fromkeys(command for text in TEXTS for command in commands_of(text)))
INLINE = sorted({command for text in TEXTS for command in inline_commands_of(text)})
TABLES = (RUN_BY_OTHER_TESTS, RUN_HERE, RUN_HERE_SHORTENED, NOT_RUN)


def is_row_of(row, command):
    """Returns whether a row of a table is a whole command, or a part of a script of several lines."""
    return row in command if "\n" in command else row == command


def test_every_command_is_in_one_table_and_every_row_on_a_page():
    rows = [row for table in TABLES for row in table]
    assert len(SHOWN) > 40 and len(INLINE) > 30
    lost = [command for command in SHOWN if sum(is_row_of(row, command) for row in rows) != 1]
    assert not lost, "run it, or say which test does or why it cannot be run"
    assert [row for row in rows if not any(is_row_of(row, command) for command in SHOWN)] == []


@pytest.mark.parametrize("command", RUN_BY_OTHER_TESTS)
def test_the_other_test_has_the_command(command):
    file, pieces = RUN_BY_OTHER_TESTS[command]
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert [piece for piece in pieces or [f'"{command}"'] if piece not in text] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that commands name, and on the PATH what they call."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "train.py").write_text(TRAIN)
    (folder / "hosts").write_text("localhost slots=2\n")
    (folder / "table.json").write_text(TABLE)
    # As an earlier run has left it.
    with claim_output_folder(str(folder / "noise"), "npu-run", "--out", MADE_BY["npu-run"]):
        for path, shift in {"noise/repeat-0": 0, "noise/repeat-1": 1, "noise/repeat-2": -1, "out/npu": 0.5}.items():
            noise = random.Random(path)
            write_history(str(folder / path), [3 - step / 20 + noise.gauss(shift, 1) / 1000 for step in range(40)])
            (folder / path / "trial.json").touch()
    for name in ("digits", "again"):
        write_history(str(folder / "out" / name), [3.0, 2.0, 1.0])
    (folder / "timeline").mkdir()
    (folder / "timeline" / "tail.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    tail = {"steps": [20, 24], "step_ms": 20.0, "exposed_ms": 2.5, "traces": []}
    (folder / "timeline" / "tail.json").write_text(json.dumps(tail))
    for path, line in {"hosts.sh": "echo localhost:2", "bin/scontrol": "echo localhost"}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(f"#!/bin/sh\n{line}\n")
        (folder / path).chmod(0o755)
    return folder


def output_of(command, folder, **variables):
    # Without what a rank, or the `make test` that started this, has set: its variables are options of the Makefile.
    kept = re.compile(r"(?!RANK|HOROVOD|MAKE|MFLAGS|(ARGS|STEPS|OUT|CONFIG|WORKERS|PYTHON)$)")
    environment = {name: text for name, text in os.environ.items() if kept.match(name)}
    search = [folder / "bin", pathlib.Path(sys.executable).parent, environment["PATH"]]
    environment.update(PATH=os.pathsep.join(map(str, search)), PYTHONPATH=str(ROOT), **variables)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECS,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.mark.few_fast(4, "the other commands take the same way")
@needs_horovod
@pytest.mark.ranks(4)
@pytest.mark.parametrize("row", RUN_HERE)
def test_it_runs_as_it_stands(row, folder):
    (command,) = (command for command in SHOWN if is_row_of(row, command))
    printed = output_of(command, folder)
    for line in RUN_HERE[row]:
        assert re.search(rf"^{line}", printed, re.MULTILINE), printed
    first_lines = re.findall(r"^.*npu-run: starting .*", printed, re.MULTILINE)
    assert len(first_lines) == int("train.py" in command), "one rank speaks for all"
    if first_lines:
        ranks = re.search(r" of (\d+) ", printed)[1]
        assert re.search(rf"starting (\d+ to )?{ranks} rank", first_lines[0]) or "--hosts-from" in command


def test_predictions_are_those_that_the_page_shows(folder):
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```\n(ranks  sum alone.*?)^```", page, re.MULTILINE | re.DOTALL)
    (command,) = (command for command in SHOWN if command.startswith("npu-run plan "))
    printed = output_of(command, folder).splitlines()
    lines = [line for line in shown.splitlines() if line.strip() != "..."]
    assert len(lines) >= 3 and [line for line in lines if line.rstrip() not in printed] == []


@pytest.mark.slow("two trainings of an example")
@pytest.mark.parametrize("command", RUN_HERE_SHORTENED)
def test_an_example_with_options_that_no_other_test_gives(command, warm_python, tmp_path):
    run_warm(warm_python, command, *RUN_HERE_SHORTENED[command], "--output_dir", tmp_path / "out")
    assert any((tmp_path / "out").iterdir())


@pytest.mark.slow("loads the program of the example")
def test_options_of_the_long_bert_training_exist(warm_python):
    (command,) = (command for command in NOT_RUN if "bert_pretrain" in command)
    words = shlex.split(command)
    script = words[3]
    asked = warm_python.run([script, *words[4:], "--help"], ROOT, {**os.environ, "PYTHONPATH": str(ROOT)}, LIMIT_SECS)
    known = set(re.findall(r"^ +--(?:\[no\])?(\w+):", asked.stdout, re.MULTILINE))
    assert {word[2:] for word in words[4:] if word.startswith("--")} <= known, asked.stderr[-3000:]
    assert (ROOT / "configs" / "bert_small.toml").exists()


def after(name, command):
    """The words that follow a program's name in a command, without quotes; None where it is not called."""
    words = shlex.split(command.partition(";")[0])
    return words[words.index(name) + 1 :] if name in words else None


@pytest.mark.parametrize("command", [command for command in SHOWN if "\n" not in command and "npu-run" in command])
def test_npu_run_understands_its_options(command):
    arguments = after("npu-run", command)
    if arguments[0] in cli.COMMANDS:
        understand = getattr(importlib.import_module(cli.COMMANDS[arguments[0]]), arguments[0])
        arguments = arguments[1:]
    else:
        understand = cli.run_script
    context = understand.make_context("npu-run", arguments)
    assert context.params.get("script", ".py").endswith((".py", ".toml"))


@needs_horovod
@pytest.mark.parametrize("command", sorted({command for command in [*SHOWN, *INLINE] if command[:11] == "horovodrun "}))
def test_horovodrun_understands_its_options(command, monkeypatch):
    from horovod.runner.launch import parse_args

    monkeypatch.setattr(sys, "argv", shlex.split(command))
    assert parse_args().command[-1] == "train.py"


def npu_run_options(command):
    """The options that npu-run itself gets in a text in which the reader has to fill in something."""
    words = command.replace("`", "").split()
    words = words[words.index("npu-run") + 1 :]
    ends = [number for number, word in enumerate(words) if SCRIPT.fullmatch(word)]
    return words[0], [word for word in words[: ends[0] if ends else None] if word.startswith("-")]


@pytest.mark.parametrize("command", [command for command in INLINE if "npu-run" in command.split()])
def test_options_in_sentences_exist(command):
    name, options = npu_run_options(command)
    module = importlib.import_module(cli.COMMANDS[name]) if name in cli.COMMANDS else None
    understand = getattr(module, name) if module else cli.run_script
    known = {option for parameter in understand.params for option in parameter.opts} | {"--help"}
    assert set(options) <= known
    assert module or name.startswith("-") or SCRIPT.fullmatch(name) or name in ("python", "...", "SCRIPT", "COMMAND"), (
        name
    )


def test_what_python_starts_exists():
    for command in INLINE:
        arguments = after("python", command)
        if arguments and arguments[0] == "-m":
            assert len(arguments) == 1 or importlib.util.find_spec(arguments[1]), command
        elif arguments and "/" in arguments[0]:
            assert (ROOT / arguments[0]).exists(), command


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_knows_its_targets():
    """A dry run of each; that of `make train` starts what the page of the example shows."""
    commands = {command for command in {*SHOWN, *INLINE} if command.startswith("make ")}
    printed = {command: output_of(f"{command} --dry-run", ROOT) for command in sorted(commands)}
    assert len(printed) > 7
    assert re.search(r"npu-run -np 2 examples/bert_pretrain/train\.py .*--distributed", unfolded(printed["make train"]))
    (short,) = (command for command in printed if command.startswith("make train RANKS=1"))
    assert re.search(r"npu-run -np 1 .*--num_train_steps 50 --output_dir 'out/short' *$", unfolded(printed[short]))


def unfolded(lines):
    return re.sub(r"\s*\\\n\s*", " ", lines).strip()


def test_pip_understands_its_options_and_extras_exist():
    commands = [command for command in SHOWN if " pip " in f" {command}"]
    helped = subprocess.run([sys.executable, "-m", "pip", "install", "--help"], capture_output=True, text=True)
    if helped.returncode:
        pytest.skip("pip is not installed")
    settings = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    extras = settings.partition("[options.extras_require]\n")[2].partition("\n[")[0]
    for command in commands:
        action, *words = after("pip", command)
        assert action == "install" and commands
        assert [word for word in words if word.startswith("-") and word not in helped.stdout] == []
        for names in re.findall(r"(?:npu-bridge|\.)\[(.+?)\]", command):
            assert [name for name in names.split(",") if not re.search(rf"^{name} =", extras, re.MULTILINE)] == []
