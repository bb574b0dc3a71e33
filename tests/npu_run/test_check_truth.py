"""`npu-run check` tells the truth: what a run refuses of a script's text, it refuses in the same words."""

from __future__ import annotations

import os
import pathlib
import re

import pytest
from click.testing import CliRunner

from npu_run.check import check
from npu_run.real_checks import catch_refusal, import_object, simulated_run
from npu_run.tensorflow_choice import TensorFlowChoice
from tests.npu_run.launching import ROOT, npu_run, write_script
from tests.npu_run.planted import planted

LEAST_SHARE = 0.95
EXAMPLES = sorted(path.relative_to(ROOT) for path in pathlib.Path(ROOT, "examples").glob("*/*.py"))


def find_call_error(text):
    """Returns the error that a script raises, or None; other tests of this process do not see what it sets."""
    with simulated_run(1):
        try:
            exec(compile(text, "train.py", "exec"), {"__name__": "train"})
        except Exception as error:
            return error
    return None


def stops_of(script):
    return [each for each in TensorFlowChoice().survey_script(str(script)).findings if each.severity == "stops it"]


def test_what_a_run_refuses_is_named_in_its_words_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused, missed, false = 0, [], []
    for name, text in planted():
        error, stops = find_call_error(text), stops_of(write_script(tmp_path, text))
        refused += error is not None
        if error is None and stops:
            false.append((name, stops[0].remark))
        elif error is not None and not any(_words(error) in _words(each.remark) for each in stops):
            missed.append((name, str(error), [each.remark for each in stops]))
    assert not false
    assert not [name for name, *_ in missed if name.startswith("SyncBeforeSavingHook(")], "its module has moved"
    assert refused >= 1000 and len(missed) <= (1 - LEAST_SHARE) * refused, missed


def _words(said):
    return re.sub(r"0x\w+", "", str(said).partition(" (/")[0])  # without addresses and paths


def test_checks_leave_no_variables_behind():
    """A hook of steps and losses writes its variables when it is made."""
    before = dict(os.environ)
    with simulated_run(1):
        assert (
            catch_refusal(import_object("npu_bridge.npu_init.TellMeStepOrLossHook"), loss="loss:0", final_loss=0.5)
            is None
        )
        assert dict(os.environ) != before
    assert dict(os.environ) == before


def test_examples_have_nothing_that_stops_them(monkeypatch):
    monkeypatch.chdir(ROOT)
    stops = [stop for path in EXAMPLES for stop in stops_of(path)]
    assert [stop for stop in stops if stop.kind != "needed"] == []  # one of them needs tensorflow-addons


@pytest.mark.slow("a process loads TensorFlow")
def test_the_launcher_ends_with_the_same_words(tmp_path):
    script = write_script(tmp_path, dict(planted())["keras wire"])
    (stop,) = stops_of(script)
    code, output = npu_run(script, cwd=tmp_path)
    assert code == 1 and stop.remark in output


BEGIN = """
import tensorflow as tf
from npu_bridge.npu_init import *
"""
SHARD = "data = data.shard(get_rank_size(), get_rank_id())\n"
OF_RANKS = {  # a mistake: its text, its severity, what is cured by what
    "is_distributed left out": (
        f"{SHARD}NPUOptimizer(opt, manager, is_loss_scale=True)\n",
        "changes numbers",
        ("is_loss_scale=True", "is_distributed=True, is_loss_scale=True"),
    ),
    "a plain Keras optimizer": (
        "model.compile('sgd')\nmodel.fit(x, callbacks=npu_callbacks_append())\n",
        "changes numbers",
        ("'sgd'", "npu_keras_optimizer(opt)"),
    ),
    "the same rows on all ranks": (
        "optimizer = npu_tf_optimizer(opt)\ndata = tf.data.Dataset.from_tensor_slices(x)\n",
        "changes numbers",
        ("slices(x)", "slices(x).shard(get_rank_size(), get_rank_id())"),
    ),
    "a loop whose length depends on the rank": (
        "first = get_rank_id()\nfor start in range(first, 100, 4):\n    session.run(train_op)\n",
        "stops it",
        ("first, 100, 4", "100"),
    ),
    "a loop over this rank's rows": (
        f"{SHARD}batches = data.batch(4)\nmodel.fit(batches, epochs=2)\n",
        "harmless",
        ("batch(4)", "batch(4).repeat()"),
    ),
}


@pytest.mark.parametrize("name", OF_RANKS)
def test_mistakes_of_ranks_are_told_with_their_effect_until_they_are_cured(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, severity, cure = OF_RANKS[name]
    write_script(tmp_path, BEGIN + text)
    page = CliRunner().invoke(check, ["train.py"]).output
    assert f": {name} ({severity}): " in page, page
    write_script(tmp_path, BEGIN + text.replace(*cure))
    assert name not in CliRunner().invoke(check, ["train.py"]).output


UNDECIDED = """
import sys
from npu_bridge.npu_init import *
mode, manager = sys.argv[1], make_manager()
NPURunConfig(modify_mixlist="lists.json", precision_mode=mode)
NPURunConfig(session_config=other, modify_mixlist="lists.json")
NPURunConfig(compress_weight_conf=mode, enable_compress_weight=True)
NPUOptimizer(tf.train.AdamOptimizer(0.1), manager, is_loss_scale=True)
NPUOptimizer(make(), is_loss_scale=True, **more)
hccl_ops.allgather(x, 8)
hccl_ops.broadcast([x], 3, group="of_four")
NPUEstimator(model_fn, config=make_config(), model_dir="made_by_check")
settings = {}
settings["precision_mode"] = "force_fp16"
NPURunConfig(precision_mode_v2="fp16", **settings)
if mode:
    custom_op.parameter_map["precision_mode"].s = b"force_fp16"
else:
    custom_op.parameter_map["precision_mode_v2"].s = b"fp16"
custom_op.parameter_map["modify_mixlist"].s = b"lists.json"
training.parameter_map["precision_mode"].s = b"force_fp16"
training = other.graph_options.rewrite_options.custom_optimizers.add()
training.parameter_map["precision_mode_v2"].s = b"fp16"
try:
    training.parameter_map["precision_mode_v2"].s = b"unknown"
except ValueError:
    pass
DumpConfig(enable_dump=True, dump_path=mode)
npu_device_of_mine.open(nothing=1)
base = tf.keras.optimizers.SGD(0.1)
if mode:
    scaled = npu_keras_optimizer(base, FixedLossScaleManager(8))
else:
    scaled = npu_keras_optimizer(base, FixedLossScaleManager(16))
@tf.RegisterGradient("OfNobody")
def gradient(op, grad):
    return hccl_ops.remote_read(op, grad)
"""


def test_what_the_text_does_not_say_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert stops_of(write_script(tmp_path, UNDECIDED)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_rows_that_a_slice_deals_out_are_a_part_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_script(
        tmp_path, f"{BEGIN}own = rows[get_rank_id() :: get_rank_size()]\nmodel.fit(own)\nmodel.fit(rows[::-1])\n"
    )
    page = CliRunner().invoke(check, ["train.py"]).output
    assert page.count("a loop over this rank's rows") == 1 and "train.py:5: a loop over" in page
