"""A person's first hour: tasks, each done by typing what the README or a help says.

A test types the command and looks for the lines that a person would look for. Trainings of earlier tasks are what later
ones look at.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.journeys.test_first_minutes import MOST_LINES, before_first_step, lines_of
from tests.journeys.test_readme import EXAMPLES, README, REPOSITORY, environment_of_a_user

pytestmark = pytest.mark.ranks(2)
DIGITS = "examples/digits/train_estimator.py"
SCRIPTS = dict(zip(("estimator", "session", "keras"), EXAMPLES))
FIRST_LINES = {"estimator": r"step 1/100", "session": r"^loss \d", "keras": r"^Epoch 1/5"}
LAST_LINES = {
    "estimator": r"^step 100/100 ",
    "session": r"^loss \S+ at loss scale 65536\.0$",
    "keras": r"^rank 0 skipped",
}


class Desk:
    """A folder with a person's scripts, and what was printed there so far."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.printed = {}

    def write(self, name, text):
        (self.folder / name).write_text(text)

    def type(self, *words, code=0):
        """Runs `npu-run words` or another command, once; gives its lines."""
        if words not in self.printed:
            place = {"npu-run": [sys.executable, "-m", "npu_bridge.run"], "python": [sys.executable]}
            command = [*place.get(words[0], [words[0]]), *words[1:]]
            self.printed[words] = lines_of(command, self.folder, code=code)
        return self.printed[words]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    desk = Desk(tmp_path_factory.mktemp("desk"))
    (desk.folder / "examples").symlink_to(REPOSITORY / "examples")
    return desk


def shown(lines, pattern):
    found = next((line for line in lines if re.search(pattern, line)), None)
    assert found is not None, "\n".join([pattern, *lines])
    return found


def digits(desk, steps):
    return desk.type("npu-run", "-np", "2", DIGITS, f"--steps={steps}", "--output_dir=out/digits")


def test_01_install(desk):
    """`make` says what there is; README says what is needed."""
    listed = subprocess.run(["make"], cwd=REPOSITORY, env=environment_of_a_user(), capture_output=True, text=True)
    listed = listed.stdout
    assert re.search(r"make venv +\.venv with TensorFlow, Horovod", listed) and "make train" in listed
    assert "You need Python and make." in README and "\nmake train\n" in README
    assert re.fullmatch(r"npu-run, version \d+\.\d+.*", desk.type("npu-run", "--version")[0])


def test_02_train(desk):
    lines = digits(desk, 4)
    assert len(before_first_step(lines, r"^step 1/4")) <= MOST_LINES, lines
    line = r"loss \d.* \| learning rate .* \| loss scale 2\^15 \| skipped 0 steps \| .* steps/s \| .* samples/s"
    assert re.search(line, shown(lines, r"^step 4/4"))
    for line in (
        r"^trained 4 steps on 2 ranks in ",
        r"^  loss \d.* -> .* \(mean of the last 4 steps\)",
        r"peak memory .* on rank 0, .* on rank 1",
    ):
        shown(lines, line)
    shown(lines, r"^evaluation at step 4 \| loss .* \| accuracy ")


def test_03_see_the_loss_in_tensorboard(desk):
    digits(desk, 4)
    events = EventAccumulator(str(desk.folder / "out" / "digits"))
    events.Reload()
    curves = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    losses = [tag for tag in curves if tag == "loss" or tag.endswith("/loss")]
    assert len(losses) == 1 and curves[losses[0]][0] == 1, curves
    for part in ("loss_scale", "skipped", "learning_rate", "gradient_norm", "samples", "memory"):
        assert any(part in tag for tag in curves), (part, sorted(curves))


def test_04_resume(desk):
    digits(desk, 4)
    lines = digits(desk, 8)
    shown(lines, r"resuming from step 4")
    assert not any(line.startswith("step 4/") for line in lines)
    shown(lines, r"^step 8/8 \(100 %\)")


def test_05_open_the_report(desk):
    link = shown(digits(desk, 4), r"^report file://").partition("file://")[2]
    page = pathlib.Path(link).read_text()
    assert "<svg" in page and 'data-last-step="' in page


def test_11_lose_a_rank(desk):
    text = SCRIPTS["session"].replace("session.run(train_op)", "session.run(train_op)\n        1 / (1 - get_rank_id())")
    desk.write("loses.py", text)
    lines = desk.type("npu-run", "-np", "2", "loses.py", code=1)
    assert re.match(r"npu-run: rank 1 .*ZeroDivisionError", lines[-1]), lines
    assert "\n".join(lines).count("Traceback") == 1, lines


@pytest.mark.few_fast(["keras"], "test_code_of_pages.py runs the others on two ranks")
@pytest.mark.parametrize("name", SCRIPTS)
def test_15_to_17_run_it_on_two_ranks(name, desk):
    text = SCRIPTS[name].replace("out/line", "out/two")
    desk.write(f"two_{name}.py", text)
    assert "npu-run -np 2 train.py" in README
    lines = desk.type("npu-run", "-np", "2", f"two_{name}.py")
    assert lines[0] == f"npu-run: starting 2 ranks of two_{name}.py"
    before = before_first_step([line for line in lines if not line.startswith("[rank 1]")], FIRST_LINES[name])
    assert len(before) <= MOST_LINES, lines
    assert not any("save into one folder" in line for line in lines), lines
    shown(lines, LAST_LINES[name])
