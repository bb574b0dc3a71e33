"""A person's first hour: twenty tasks, each done by typing what the README or a help says.

A test types the command and looks for the lines that a person would look for. The tasks come in the order in which a
person does them; trainings of earlier ones are what later ones look at.
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
# A person's changes in README's Estimator.
CHANGES = {
    "precision": ("save_checkpoints_steps=50", 'precision_mode_v2="mixed_bfloat16", op_debug_level=1'),
    "misspelt": ("save_checkpoints_steps=50", 'precision_mod="mixed_float16"'),
    "diverges": ("tf.train.AdamOptimizer(0.05)", "tf.train.GradientDescentOptimizer(1e30)"),
    "other model": ('"weights", [4, 1]', '"kernel", [4, 1]'),
}
EXPORT = """
receiver = tf.estimator.export.build_raw_serving_input_receiver_fn({"x": tf.placeholder(tf.float32, [None, 4])})


def exported_fn(features, labels, mode):
    weights = tf.get_variable("weights", [4, 1])
    return tf.estimator.EstimatorSpec(mode, predictions=tf.matmul(features["x"], weights))


exported = tf.estimator.Estimator(exported_fn, model_dir="out/line").export_saved_model("out/exported", receiver)
with tf.Session(graph=tf.Graph()) as session:
    loaded = tf.saved_model.load(session, ["serve"], exported.decode())
    signature = loaded.signature_def["serving_default"]
    (given,), (answer,) = signature.inputs.values(), signature.outputs.values()
    print("the exported model says", session.run(answer.name, {given.name: [[1.0, 2.0, 3.0, 4.0]]})[0, 0])
"""


# Of docs/keras.md, with Keras 3 where it is installed: a training to its export, what serves it, one that resumes.
KERAS_PAGE = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "keras.md").read_text(), re.DOTALL)
WHOLE = next(code for code in KERAS_PAGE if "model.export(" in code)
SERVING = next(code for code in KERAS_PAGE if "saved_model.load(" in code)
RESUMING = next(code for code in KERAS_PAGE if "ResumeCallback(" in code)
LOSING = """
class Lose(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            1 / (1 - rank)


callbacks = [Lose(), """


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
    for name, text in SCRIPTS.items():
        desk.write(f"own_{name}.py", text)
    for name, (old, new) in CHANGES.items():
        assert old in SCRIPTS["estimator"]
        changed = SCRIPTS["estimator"].replace(old, new)
        if name in ("diverges", "other model"):
            changed = changed.replace("tf.estimator.Estimator(", "NPUEstimator(").replace("hooks=hooks, ", "")
            changed = changed.replace("max_steps=100", "max_steps=200")
        desk.write(f"{name.replace(' ', '_')}.py", changed if name == "other model" else changed.replace("line", name))
    (desk.folder / "examples").symlink_to(REPOSITORY / "examples")
    return desk


def shown(lines, pattern):
    """The first line with a pattern."""
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


def test_06_misspell_a_command(desk):
    lines = desk.type("npu-run", "chekc", "train.py", code=2)
    assert lines == ["npu-run: there is no command 'chekc' and no such file: did you mean check?"]


def test_07_misspell_a_script(desk):
    assert desk.type("npu-run", "own_estimatr.py", code=2) == [
        "npu-run: there is no file 'own_estimatr.py' to run: did you mean own_estimator.py?"
    ]


@pytest.mark.slow("tests/options has what is said")
def test_08_misspell_an_option(desk):
    last = desk.type("npu-run", "misspelt.py", code=1)[-1]
    assert "precision_mod" in last and "Did you mean 'precision_mode" in last


@pytest.mark.slow("another training")
def test_09_let_the_loss_diverge(desk):
    lines = desk.type("npu-run", "diverges.py", code=1)
    end = lines[next(number for number, line in enumerate(lines) if "report, with the error: file://" in line) :]
    assert end[1].startswith("Traceback") and len(end) <= 7, lines
    assert re.search(r"(LossIsNan|LossScaleCollapse)Error", lines[-1]), lines


@pytest.mark.slow("two more trainings; tests/documented has the message")
def test_10_meet_the_checkpoint_of_another_model(desk):
    desk.type("python", "own_estimator.py")
    lines = desk.type("npu-run", "other_model.py", code=1)
    assert "\n".join(lines).count("Traceback") == 1 and len(lines) <= 20, lines
    assert re.search(
        r"out/line/model\.ckpt-100 lacks .* Restore the checkpoint into the model from which it was saved", lines[-1]
    ), lines


def test_11_lose_a_rank(desk):
    text = SCRIPTS["session"].replace("session.run(train_op)", "session.run(train_op)\n        1 / (1 - get_rank_id())")
    desk.write("loses.py", text)
    lines = desk.type("npu-run", "-np", "2", "loses.py", code=1)
    assert re.match(r"npu-run: rank 1 .*ZeroDivisionError", lines[-1]), lines
    assert "\n".join(lines).count("Traceback") == 1, lines


@pytest.mark.slow("the same three run on two ranks")
@pytest.mark.parametrize("name", SCRIPTS)
def test_12_to_14_run_an_own_script(name, desk):
    lines = desk.type("python", f"own_{name}.py")
    assert before_first_step(lines, FIRST_LINES[name]) == []
    shown(lines, LAST_LINES[name])


@pytest.mark.few_fast(["keras"], "test_readme.py runs the others on two ranks")
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


@pytest.mark.slow("two more trainings; tests/npu_run/compare compares written ones")
def test_18_compare_two_trainings(desk):
    """Two different models are reported as such; of a model with itself, all bits are equal."""
    desk.type("python", "own_estimator.py")
    digits(desk, 4)
    lines = desk.type("npu-run", "compare", "out/line", "out/digits", code=2)
    shown(lines, r"The checkpoints are of different models: they share 2 variables, 3 are only in A, such as weights")
    shown(desk.type("npu-run", "compare", "out/line", "out/line"), r"^checkpoints: inside\. .* are equal to the bit\.$")


@pytest.mark.slow("another training; tests/session/precision has the kernels")
def test_19_change_the_precision_and_learn_what_an_option_does(desk):
    lines = desk.type("npu-run", "precision.py")
    idle = shown(lines, r"^npu_bridge: .* no effect here \(op_debug_level\)")
    assert "npu-run effects precision.py" in idle
    assert re.search(r"\| bfloat16(, imitated)? \|", shown(lines, r"^step 100/100"))
    effects = "\n".join(desk.type("npu-run", "effects", "precision.py"))
    assert re.search(r"no effect here\n.*op_debug_level.*No kernel files are made", effects), effects
    found = list((REPOSITORY / "docs").glob("options*.md"))
    assert any("| `op_debug_level` " in page.read_text() for page in found)


@pytest.mark.slow("tests/parity has exported models")
def test_20_export(desk):
    desk.type("python", "own_estimator.py")
    desk.write("export.py", "from npu_bridge.npu_init import *\n" + EXPORT)
    answer = shown(desk.type("python", "export.py"), r"^the exported model says")
    assert float(answer.rsplit(" ", 1)[1]) == pytest.approx(10.0, abs=0.5)


def changed(text, *pairs):
    """A script with changes, each of which it needs."""
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.mark.slow("tests/reporting has the message")
def test_21_let_the_loss_of_fit_diverge_and_cure_it(desk):
    """Without a loss scale, the loss is NaN, and a line says so; the manager that it names skips, and training ends."""
    imported = "import npu_callbacks_append, ", "import FixedLossScaleManager, npu_callbacks_append, "
    rate, long = "Adam(0.01)", ("batch_size=32", "batch_size=32, epochs=3")
    desk.write("diverges_keras.py", changed(KERAS_PAGE[0], (rate, "SGD(1e30)")))
    advice = shown(desk.type("npu-run", "-np", "2", "diverges_keras.py"), r"loss: it is NaN")
    assert "Lower the learning rate" in advice and "FixedLossScaleManager(1)" in advice
    desk.write("skips.py", changed(KERAS_PAGE[0], imported, (f"{rate})", "SGD(1e30), FixedLossScaleManager(1))"), long))
    shown(desk.type("npu-run", "-np", "2", "skips.py"), r"10 steps in a row were skipped.*enable_check_numerics\(\)")
    desk.write("cured.py", changed(KERAS_PAGE[0], (rate, "SGD(0.01)")))
    assert not any("it is NaN" in line for line in desk.type("npu-run", "-np", "2", "cured.py"))


@pytest.mark.slow("tests/ranks has the message")
def test_22_resume_fit_from_another_model(desk):
    desk.write("resume.py", RESUMING)
    desk.type("npu-run", "-np", "2", "resume.py")
    desk.write("wider.py", changed(RESUMING, ("keras.layers.Dense(1)", "keras.layers.Dense(4), keras.layers.Dense(1)")))
    lines = desk.type("npu-run", "-np", "2", "wider.py", code=1)
    assert "resumed.keras is a checkpoint of another model" in lines[-1] and "Use another path" in lines[-1], lines
    assert "\n".join(lines).count("Traceback") == 1 and len(lines) <= 12, lines


@pytest.mark.slow("another training; tests/npu_run has how jobs end")
def test_23_lose_a_rank_of_fit(desk):
    desk.write("loses_keras.py", changed(WHOLE, ("callbacks = [keras", f"{LOSING.strip()} keras")))
    lines = desk.type("npu-run", "-np", "2", "loses_keras.py", code=1)
    assert re.match(r"npu-run: rank 1 .*ZeroDivisionError", lines[-1]), lines
    assert "\n".join(lines).count("Traceback") == 1, lines


@pytest.mark.slow("two more trainings; tests/parity has exported models")
def test_24_export_the_model_of_fit(desk):
    desk.write("whole.py", WHOLE)
    desk.type("npu-run", "-np", "2", "whole.py")
    desk.write("serve.py", SERVING)
    served = shown(desk.type("npu-run", "serve.py"), r"^kinds \[")
    guessed, expected = re.findall(r"\[([\d ]+)\]", served)
    assert sum(one == other for one, other in zip(guessed.split(), expected.split())) >= 4
