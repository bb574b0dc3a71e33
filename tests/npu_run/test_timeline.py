"""`npu-run --timeline`: real jobs of unchanged scripts, recorded."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from npu_bridge.base.output_folders import claim_output_folder
from npu_run.errors import LaunchError
from npu_run.outputs import MADE_BY
from npu_run.timeline import Recording
from tests.npu_run.launching import needs_horovod, npu_run, write_script

PLAIN_SESSION = """
import os, subprocess, sys
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
assert "tensorflow" not in sys.modules, "the launcher has imported TensorFlow"
assert not [name for name in os.environ if name.startswith("NPU_RUN_TIMELINE")], "what the script starts would record"
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
from npu_bridge.npu_init import NPUOptimizer, FixedLossScaleManager, set_split_strategy_by_idx

class Descent(tf.train.Optimizer):
    # Of assignments, as initializers are: that it trains shows in its gradients alone.
    def _resource_apply_dense(self, gradient, variable):
        return variable.assign(variable - 0.01 * gradient)

set_split_strategy_by_idx([0, 2, 3])
value = tf.ones([4, 8])
for layer in range(4):
    value = tf.tanh(tf.matmul(value, tf.get_variable(f"w{layer}", [8, 8], use_resource=True)))
optimizer = NPUOptimizer(
    Descent(False, "Descent"), FixedLossScaleManager(8.0), is_distributed=True, is_loss_scale=True,
    is_tailing_optimization=True,
)
train = optimizer.minimize(tf.reduce_sum(value))
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for step in range(7):
        metadata = tf.RunMetadata()
        session.run(train, run_metadata=metadata)
        session.run(value)
        # In one piece: parts of lines are shown, too.
        sys.stdout.write(f"step {step} is recorded: {len(metadata.step_stats.dev_stats) > 0}\\n")
"""


def facts_of(folder, rank):
    """Events of the Chrome trace of a rank, and what npu_bridge says in it."""
    content = json.loads((folder / f"timeline_rank_{rank}.json").read_text())
    return content["traceEvents"], content["npu_bridge"]


@needs_horovod
def test_the_steps_asked_for_are_recorded_on_every_rank(tmp_path):
    write_script(tmp_path, PLAIN_SESSION)
    folder = tmp_path / "seen"
    with claim_output_folder(str(folder), "npu-run", "--out", MADE_BY["npu-run"]):
        (folder / "timeline_rank_1.json").write_text("of an earlier run")
    code, output = npu_run("-np", "2", "--timeline", " 3:5 ", "--out", "seen", "train.py", cwd=tmp_path)
    assert code == 0
    # The run metadata that a script asks for stays its own.
    recorded = [line for line in output.splitlines() if line.startswith("step") and line.endswith("True")]
    assert recorded == ["step 3 is recorded: True", "step 4 is recorded: True"]
    line = output.splitlines()[-1]
    assert line.startswith("timeline: steps 3-4, exposed tail ")
    assert line.endswith("(the median step); seen/tail.svg")

    for rank in (0, 1):
        events, facts = facts_of(folder, rank)
        assert [step["step"] for step in facts["steps"]] == [3, 4]
        for step in facts["steps"]:
            assert sorted(t["fragment"] for t in step["transfers"] if not t["is_decision"]) == [0, 1, 2]
            assert sum(t["is_decision"] for t in step["transfers"]) == 1
            assert 0 < step["backward_end_ms"] < step["duration_ms"]
            assert step["updates"]
        named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        assert named
        assert all(name.startswith(f"rank {rank}: ") for name in named)
        assert len({event["args"]["name"] for event in events if "_fragment_" in event["args"].get("name", "")}) == 3
    merged = json.loads((folder / "tail.json").read_text())
    assert [(trace["step"], trace["rank"]) for trace in merged["traces"]] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    for trace in merged["traces"]:
        assert all(t["begin_ms"] <= t["wire_ms"] <= t["end_ms"] for t in trace["transfers"])
    picture = (folder / "tail.svg").read_text()
    ElementTree.fromstring(picture)
    assert f"Step {merged['shown_step']}, rank 0 of 2" in picture


FIT = """
import sys
import keras  # Keras 2 with TensorFlow 2.15, else Keras 3
import numpy as np
import tensorflow as tf
from npu_bridge.npu_init import npu_callbacks_append, npu_keras_optimizer

way = sys.argv[1]
# XLA compiles one long computation, so that a pause of a busy machine is short beside it.
widths = [2000, 2000] if way == "compiled" else [8]
model = keras.Sequential([*(keras.layers.Dense(width, "tanh") for width in widths), keras.layers.Dense(1)])
optimizer = npu_keras_optimizer(keras.optimizers.Adam(0.1), is_distributed=way != "compiled")
values = np.ones([48, 4], "f")


@tf.function
def step(rows):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(rows) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))


if way == "loop":
    model.build([None, 4])
    for start in range(0, 48, 8):
        step(tf.constant(values[start : start + 8]))
else:
    settings = {"fit": {}, "executions": {"steps_per_execution": 2}, "compiled": {"jit_compile": True}}[way]
    model.compile(optimizer, "mse", **settings)
    model.evaluate(values, values[:, :1], verbose=0)
    model.fit(values, values[:, :1], 8, epochs=2, verbose=0, callbacks=npu_callbacks_append())
"""


@needs_horovod
@pytest.mark.few_fast(1, "the others record in the same way")
@pytest.mark.parametrize("way", ["fit", "loop", "executions"])
def test_steps_of_fit_and_of_functions_are_recorded(way, tmp_path):
    write_script(tmp_path, FIT)
    code, output = npu_run("-np", "2", "--timeline", "3:5", "train.py", way, cwd=tmp_path)
    assert code == 0
    assert output.splitlines()[-1].startswith("timeline: steps 3-4, exposed tail ")
    merged = json.loads((tmp_path / "timeline" / "tail.json").read_text())
    assert [(trace["step"], trace["rank"]) for trace in merged["traces"]] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    for first, second in zip(merged["traces"][::2], merged["traces"][1::2]):
        waits = []
        for trace in (first, second):
            (fragment,) = [transfer for transfer in trace["transfers"] if transfer["fragment"] == 0]
            waits.append(fragment["wire_ms"] - fragment["begin_ms"])
            assert trace["compute"] and trace["updates"]
            assert trace["backward_end_ms"] <= fragment["begin_ms"] < fragment["end_ms"] < trace["duration_ms"]
        assert min(waits) == pytest.approx(0, abs=0.001), "the rank that comes last does not wait"
    events, _ = facts_of(tmp_path / "timeline", 1)
    names = {event["args"]["name"] for event in events}
    assert any("MatMul" in name for name in names) and any("_fragment_0" in name for name in names)


@pytest.mark.slow("a case without ranks")
def test_a_step_that_xla_compiles_is_one_computation(tmp_path):
    write_script(tmp_path, FIT)
    code, output = npu_run("--timeline", "3:5", "train.py", "compiled", cwd=tmp_path)
    assert code == 0 and "timeline: steps 3-4, exposed tail 0.0 ms of " in output.splitlines()[-1]
    trace = json.loads((tmp_path / "timeline" / "tail.json").read_text())["traces"][0]
    assert sum(end - begin for begin, end in trace["compute"]) > 0.5 * trace["duration_ms"]


def test_steps_that_never_come_are_said(tmp_path):
    recording = Recording(50, 55, str(tmp_path))
    facts = {"rank": 0, "steps": [], "first_step_seen": 0, "last_step_seen": 3, "steps_per_run": 1}
    (tmp_path / "timeline_rank_0.json").write_text(json.dumps({"npu_bridge": facts}))
    assert recording.draw_tail(1) == (
        "timeline: nothing was recorded of steps 50-54. This run trained steps 0 to 3. Choose steps in this range."
    )
    assert not (tmp_path / "tail.svg").exists()


def test_a_script_without_sessions_is_told_apart(tmp_path):
    write_script(tmp_path, "print('nothing is trained')\nraise SystemExit(3)")
    code, output = npu_run("--timeline", "0:2", "train.py", cwd=tmp_path)
    assert code == 3  # the exit code stays
    line = output.splitlines()[-1]
    assert "or calls of model.fit or of a tf.function that update by a Keras optimizer; got none." in line


@pytest.mark.parametrize("text", ["20", "25:20", "5:5", "-1:4", "a:b", "1:2:3", ""])
def test_a_text_that_is_no_range_is_refused(text):
    with pytest.raises(LaunchError, match="Expected FIRST:LAST with FIRST < LAST") as refused:
        Recording.parse(text, "timeline")
    assert f"got {text!r}" in str(refused.value)


OVERLAPPING = """
import sys
import numpy as np
from npu_bridge.npu_init import *
import tensorflow as tf
from npu_bridge.session import overlapped_steps

overlapped_steps._LONGEST_CALL_SECS = 1e6  # however long a step takes on a busy machine


def model_fn(features, labels, mode):
    for layer in range(6):
        features = tf.layers.dense(features, 40, tf.nn.tanh)
    loss = tf.reduce_mean((tf.layers.dense(features, 1) - labels) ** 2)
    manager = FixedLossScaleManager(2.0**10)
    optimizer = NPUOptimizer(tf.train.AdamOptimizer(0.01), manager, True, True, True)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, tf.train.get_global_step()))


def data():
    values = np.random.RandomState(0).randn(64, 40).astype("f")
    return tf.data.Dataset.from_tensor_slices((values, values[:, :1])).repeat().batch(8)


config = NPURunConfig(model_dir=sys.argv[1], iterations_per_loop=10, save_checkpoints_steps=100)
NPUEstimator(model_fn, config=config).train(data, max_steps=50)
"""


@pytest.mark.slow("looks for the faster way to train first")
@needs_horovod
def test_steps_that_overlap_are_recorded_and_drawn(tmp_path, monkeypatch):
    write_script(tmp_path, OVERLAPPING)
    monkeypatch.setenv("NPU_OVERLAPPED_STEPS", "1")
    monkeypatch.setenv("FUSION_TENSOR_SIZE", "8000")
    for model in ("one", "other"):  # the second time over the files of the first
        code, output = npu_run("-np", "2", "--tf1", "--timeline", "35:50", "train.py", model, cwd=tmp_path)
        assert code == 0, output
    line = output.splitlines()[-1]
    assert "timeline: steps 39-49," in line and line.endswith("; steps that overlap: timeline/overlap.svg")
    facts = json.loads((tmp_path / "timeline" / "tail.json").read_text())
    traces = facts["overlapping_traces"]
    assert [(trace["step"], trace["rank"]) for trace in traces] == [(45 + n // 2, n % 2) for n in range(8)]
    for trace in traces:
        sent = [transfer["fragment"] for transfer in trace["transfers"] if transfer["fragment"] is not None]
        assert sorted(sent) == list(range(6))
        assert 0 < trace["backward_end_ms"] < trace["duration_ms"] and trace["updates"]
    own = [trace for trace in traces if trace["rank"] == 0]
    begin, end = own[2]["start_secs"], own[1]["start_secs"] + own[1]["duration_ms"] / 1000
    assert begin < end, "a step begins before the one before is over"
    picture = (tmp_path / "timeline" / "overlap.svg").read_text()
    ElementTree.fromstring(picture)
    assert "Steps 45 to 48, rank 0 of 2" in picture
