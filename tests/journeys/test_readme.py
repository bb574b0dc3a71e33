"""The code of the README runs unchanged."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from npu_bridge.base.install import HOROVOD, INSTALL_HOROVOD
from npu_bridge.reporting import History, summarize
from tests.reporting.chromium import assert_page

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
README = (REPOSITORY / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SCRIPTS = pathlib.Path(sys.executable).parent


def environment_of_a_user():
    """This process's, without what `make test` tells makes below it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return {**environment, "PYTHONPATH": str(REPOSITORY), "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}


def run(command, folder, time_limit_secs=600):
    environment = environment_of_a_user()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=time_limit_secs)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout + done.stderr


def test_there_are_three_uses():
    """They run on one rank and on two, together with the code of the pages; test_first_hour.py looks at their lines."""
    assert len(EXAMPLES) == 3 and "npu-run -np 2 train.py" in README and "on one rank and on two" in README
    estimator, session, keras = EXAMPLES
    assert "config=NPURunConfig(" in estimator and "est.train(input_fn, hooks=hooks" in estimator
    assert re.search(r"NPUOptimizer\(\s*LAMB\(", session) and "model.fit(" in keras
    assert len(README.split()) < 1200, "five minutes"


def shape_of(line):
    """A line with every number as 0, and files without their folders: what two runs of a command have in common."""
    line = re.sub(r"(file://)?\S*/(?=\w+\.(?:html|png))", "", line)
    return re.sub(r"2\^\d+|\d[\d.,e-]*(?: (?:ms|s|min|h)\b)*", "0", line).strip()


def lines_that_are_not_in(printed, shown):
    """Lines of a page that a run has not printed; dots stand for anything."""
    shapes = {shape_of(line) for line in printed.splitlines()}
    wanted = {line: ".*".join(map(re.escape, shape_of(line).split("..."))) for line in shown.splitlines()}
    return [line for line, pattern in wanted.items() if not any(re.fullmatch(pattern, shape) for shape in shapes)]


TRAIN_OUTPUT, SCRIPT_OUTPUT = re.findall(r"```text\n(.*?)```", README, re.DOTALL)


def test_every_example_has_a_command_and_a_page_that_shows_it():
    index = (REPOSITORY / "examples" / "README.md").read_text()
    commands = re.findall(r"^\| `python (examples/\S+\.py)` \|", index, re.MULTILINE)
    scripts = {str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("examples/*/*.py") if is_script(path)}
    assert len(commands) == len(set(commands)) and set(commands) == scripts
    for script in scripts:
        page = REPOSITORY / pathlib.Path(script).with_name("README.md")
        assert f"python {script}" in page.read_text()
        assert f"({page.relative_to(REPOSITORY / 'examples')})" in index
    assert "(examples/README.md)" in README


def is_script(path):
    return '__name__ == "__main__"' in path.read_text()


def test_the_index_of_pages_is_complete():
    pages = {page.name for page in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}
    index = (REPOSITORY / "docs" / "README.md").read_text() + (REPOSITORY / "docs" / "options.md").read_text()
    assert "(docs/README.md)" in README
    assert [page for page in sorted(pages) if f"]({page})" not in index] == []


def test_horovod_is_installed_as_the_library_says():
    page = (REPOSITORY / "docs" / "install.md").read_text()
    shown = " ".join(page.replace("\\\n", " ").split())
    assert INSTALL_HOROVOD in shown
    assert f"\nhorovod =\n    {HOROVOD}\n" in (REPOSITORY / "setup.cfg").read_text()


def knows_of(folder, checkpoint):
    """Returns whether a training that is killed now resumes from `checkpoint`, whose files exist a moment earlier."""
    state = folder / "checkpoint"
    return state.exists() and f'"{checkpoint}"' in state.read_text()


@pytest.mark.slow("a training that is killed and resumed; examples are resumed in test_first_hour.py")
@pytest.mark.skipif(SCRIPTS != REPOSITORY / ".venv" / "bin", reason="`make` uses this checkout's .venv, as `make test`")
@pytest.mark.ranks(2)
def test_make_train_trains_and_resumes(tmp_path):
    """The first command of the README, shortened; killed in the middle and run again."""
    out = tmp_path / "out"
    arguments = ["make", "train", "RANKS=2", f"OUT={out}", "ARGS=--save_checkpoints_steps=10 --num_eval_batches=1"]
    assert "make train RANKS=1 STEPS=50 OUT=out/short" in README
    # A process group of its own, as a terminal gives it: ending the job means ending make and all it started.
    with open(tmp_path / "log.txt", "w+") as log:
        first = subprocess.Popen(
            [*arguments, "STEPS=100000"],
            cwd=REPOSITORY,
            env=environment_of_a_user(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        deadline = time.monotonic() + 600
        while not knows_of(out, "model.ckpt-20") and time.monotonic() < deadline and first.poll() is None:
            time.sleep(0.05)
        os.killpg(first.pid, signal.SIGTERM)
        assert first.wait(timeout=300) != 0
        log.seek(0)
        assert knows_of(out, "model.ckpt-20"), log.read()[-4000:]

    (reached,) = re.findall(
        r'^model_checkpoint_path: "model\.ckpt-(\d+)"', (out / "checkpoint").read_text(), re.MULTILINE
    )
    end = int(reached) + 40
    printed = run([*arguments, f"STEPS={end}"], REPOSITORY)
    first_step = int(re.search(rf"^step (\d+)/{end}", printed, re.MULTILINE).group(1))
    assert first_step > 20, "it started over"
    # It resumes, and it evaluates one batch.
    shown = TRAIN_OUTPUT.replace("on 2 ranks in", f"on 2 ranks up to step {end} in").replace("8 batches", "1 batch")
    assert lines_that_are_not_in(printed, shown) == []
    summary = summarize(History(str(out / "history.jsonl")))
    assert (summary.ranks, summary.steps, summary.loss_scale) == (2, end, 65536.0)
    assert summary.last_loss < summary.first_loss - 0.5
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    page = assert_page(out / "report.html", end, tmp_path / "profile")
    assert "npu-run -np 2" in page and "training resumed here" in page
