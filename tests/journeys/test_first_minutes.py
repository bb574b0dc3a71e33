"""What a new user sees before the first step: at most three lines, on one process and on several ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.journeys.test_readme import EXAMPLES, REPOSITORY

# What TensorFlow reads when it is loaded, and what tests set for themselves.
QUIET = ("TF_CPP_MIN_LOG_LEVEL", "TFA_NO_EOL_NOTICE", "PYTHONWARNINGS", "NPU_BRIDGE_VERBOSE")
MOST_LINES = 3
SCRIPTS = {
    "optimizer": (EXAMPLES[0], r"loss 0"),
    "run configuration": (EXAMPLES[1].replace("max_steps=100", "max_steps=3"), r"step 1/3"),
    "hooks": (EXAMPLES[2], r"step 1/30"),
}
# As they stand, what each prints first, and later.
PRINTED = [
    (r"loss 0", r"loss [0-7]\.\d+ at loss scale 65536\.0"),
    (r"step 1/100", r"step 100/100"),
    (r"step 1/30", r"step 30/30"),
]
PROGRAMS = {
    "digits/train_estimator.py": (["--steps=2", "--output_dir=out"], r"step 1/2"),
    "digits/train_session.py": (["--steps=10", "--save_steps=10", "--output_dir=out"], r"step 10/10"),
    "keras_fit/train.py": (["--steps=2", "--output_dir=out"], r"step 1/2"),
    "accelerate/train.py": (["--steps=10", "--output_dir=out"], r"step 1/10"),
    "bert_pretrain/train.py": (["--num_train_steps=2", "--num_eval_batches=0", "--output_dir=out"], r"step 1/2"),
}


def lines_of(command, folder, **variables):
    """What a command prints, all of it, as lines."""
    environment = {name: text for name, text in os.environ.items() if name not in QUIET}
    environment["PYTHONPATH"] = str(REPOSITORY)
    environment.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", "300")
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout.splitlines()


def before_first_step(lines, first_step):
    assert not any("Traceback" in line for line in lines)
    number = next((number for number, line in enumerate(lines) if re.search(first_step, line)), None)
    assert number is not None, lines
    return lines[:number]


def npu_run(ranks):
    return [sys.executable, "-m", "npu_bridge.run", "-np", str(ranks)]


@pytest.mark.parametrize("number", range(3), ids=list(SCRIPTS))
def test_code_of_the_readme_runs_as_it_stands_on_one_process(number, tmp_path):
    (tmp_path / "train.py").write_text(EXAMPLES[number])
    first, later = PRINTED[number]
    lines = lines_of([sys.executable, "train.py"], tmp_path)
    assert before_first_step(lines, first) == []
    assert re.search(later, "\n".join(lines))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("name", "ranks"), [("optimizer", 1), ("optimizer", 2), ("run configuration", 4), ("hooks", 2)]
)
def test_code_of_the_readme_through_the_launcher(name, ranks, tmp_path):
    code, first_step = SCRIPTS[name]
    (tmp_path / "train.py").write_text(code)
    lines = before_first_step(lines_of([*npu_run(ranks), "train.py"], tmp_path), first_step)
    assert lines[0] == f"npu-run: starting {ranks} rank{'s' if ranks > 1 else ''} of train.py"
    assert len([line for line in lines if not re.search(r"\bloss 0", line)]) <= MOST_LINES, lines


@pytest.mark.parametrize("program", PROGRAMS)
def test_examples_on_one_process(program, tmp_path):
    arguments, first_step = PROGRAMS[program]
    lines = lines_of([sys.executable, str(REPOSITORY / "examples" / program), *arguments], tmp_path)
    assert len(before_first_step(lines, first_step)) <= MOST_LINES, lines


@pytest.mark.ranks(2)
def test_the_longest_example_on_two_ranks_and_again_when_it_is_done(tmp_path):
    arguments, first_step = PROGRAMS["bert_pretrain/train.py"]
    command = [*npu_run(2), str(REPOSITORY / "examples" / "bert_pretrain" / "train.py"), *arguments]
    lines = before_first_step(lines_of(command, tmp_path), first_step)
    assert lines[0].startswith("npu-run: starting 2 ranks of ") and len(lines) <= MOST_LINES, lines
    again = lines_of(command, tmp_path)
    assert "already at step 2 of 2: nothing to do; --num_train_steps 4 or another --output_dir" in again and not any(
        line.startswith("step ") for line in again
    ), again


def test_warnings_of_the_script_are_shown_and_on_request_those_of_tensorflow(tmp_path):
    (tmp_path / "train.py").write_text(
        "import logging, warnings\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "logging.info('own note')\n"
        f"{EXAMPLES[1].replace('max_steps=100', 'max_steps=1')}\n"
        "warnings.warn('own warning')\n"
        "tf.logging.warning('From %s: this is deprecated', 'me')\n"
        "tf.logging.error('own error')\n"
    )
    text = "\n".join(lines_of([sys.executable, "train.py"], tmp_path))
    for shown in ("own note", "own warning", "From me: this is deprecated", "own error"):
        assert shown in text
    assert "Instructions for updating" not in text and "oneDNN" not in text
    told = "\n".join(lines_of([sys.executable, "train.py"], tmp_path, NPU_BRIDGE_VERBOSE="1"))
    assert "Instructions for updating" in told and "cpu_feature_guard" in told
    assert "NPUEstimator: already at step 1 of 1: nothing to do; train on with max_steps=2 or another model_dir" in told
