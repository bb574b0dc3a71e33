"""Stages from a file: what it makes, what is refused and where, and what `explain` tells and draws of them."""

from __future__ import annotations

import copy
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest
import tensorflow as tf
from click.testing import CliRunner

from npu_bridge import stages
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer
from npu_bridge.gradients.explanation import list_stages, ring_all_reduce_bytes, sum_sent_bytes
from npu_bridge.session.precision import rewriter
from npu_run.explain import explain
from tests.goldens.two_layers import in_graph
from tests.refusing import refuses

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "configs" / "stages.toml"


class Halved(stages.Stage):
    """A stage from another package."""

    def after_reduce(self, step):
        step.map(lambda grad: grad / 2)


def test_the_shipped_file_gives_its_stages_to_an_optimizer_and_to_copies_of_the_configuration():
    config = NPURunConfig.from_file(SHIPPED, save_checkpoints_steps=7)
    assert config.save_checkpoints_steps == 7
    expected = [
        ("Accumulate", {"steps": 4, "reduction": "mean"}),
        ("TopK", {"density": 0.01, "error_feedback": True, "per": "tensor"}),
        ("ClipByGlobalNorm", {"clip_norm": 1.0}),
        ("CentralizeGradients", stages.CentralizeGradients().get_config()),
    ]
    for kept in (config, copy.deepcopy(config), config.replace(model_dir="elsewhere")):
        assert [(type(stage).__name__, stage.get_config()) for stage in kept.stages] == expected
    with tf.Graph().as_default():
        optimizer = NPUDistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), stages=config.stages)
        told = stages.explain(optimizer)
    assert [name for name, _ in expected if name in told] == [name for name, _ in expected]
    assert NPURunConfig().stages == ()


def test_plain_data_gives_stages_also_those_defined_elsewhere():
    made = stages.from_config({"stages": [{"stage": "Halved"}, {"stage": "ClipByValue", "low": -1, "high": 2}]})
    assert [type(stage) for stage in made] == [Halved, stages.ClipByValue]
    assert made[1].get_config() == {"low": -1.0, "high": 2.0}
    every = {"Accumulate": [2], "ClipByGlobalNorm": [1], "ClipByValue": [1], "ClipLocally": [1], "TopK": [0.1]}
    every.update({"Threshold": [0.1]})
    public = [value for value in vars(stages).values() if isinstance(value, type) and issubclass(value, stages.Stage)]
    for made_by in [made_by for made_by in public if made_by.__module__ != stages.Stage.__module__]:
        try:
            stage = made_by(*every.get(made_by.__name__, []))
        except TypeError:  # of arguments that this test does not know
            continue
        table = {"stage": made_by.__name__, **stage.get_config()}
        (again,) = stages.from_config({"stages": [table]})
        assert (type(again), again.get_config()) == (made_by, stage.get_config())


@refuses(
    ValueError,
    ({"stages": [{"stage": "AllReduce", "name": "x"}]}, "unknown stage 'AllReduce'"),
    ({"stages": [{"stage": "ReducingStage"}]}, "unknown stage 'ReducingStage'"),
    ({"stages": [{"stage": 4}]}, "unknown stage 4 (int)"),
    ({"stages": [{"stage": "Halved", "by": 2}]}, "unknown argument 'by'. Expected no argument"),
    ({"stages": ["Accumulate"]}, "with 'stage'"),
    ({"stages": [], "stage": []}, "nothing else"),
    ({"stage": "Accumulate"}, "nothing else"),
    ([{"stage": "Accumulate", "steps": 4}], "not a list of stages"),
)
def test_plain_data_that_says_something_else_is_refused(given):
    stages.from_config(given)


@pytest.mark.parametrize(
    ("text", "located"),
    [
        ("[[stages]]\nsteps = 4\nstage = 'Acumulate'", r"run.toml:3: key stages\[0\].stage: .*'Accumulate'\?"),
        ("\n[[stages]] # one\nstage = 'Accumulate'\nstps = 4", r"run.toml:4: key stages\[0\].stps: .*'steps'\?"),
        (
            "[[stages]]\nstage = 'Accumulate'\nsteps = 4\n[[stages]]\nstage = 'TopK'\n\ndensity = 1.5",
            r"run.toml:7: key stages\[1\].density: .*0 < density <= 1; got 1.5",
        ),
        ("[[stages]]\nstage = 'Accumulate'\nsteps = '4'", r"run.toml:3: key stages\[0\].steps: Accumulate: "),
        ("[[stages]]\nstage = 'Accumulate'", r"run.toml:2: key stages\[0\].stage: .*required argument: 'steps'"),
        ("\n[[stages]]\nsteps = 4", r"run.toml:2: key stages\[0\]: "),
        ("x = 1\nstages = [{stage = 'TopK', densty = 0.1}]", r"run.toml:2: key stages\[0\]: .*'density'\?"),
        ("\nstages = 5", "run.toml:2: key stages: stages is not a list of tables"),
        ("[stages]\nstage = 'Accumulate'", "run.toml:1: key stages: .*above each"),
        ("[[stages]]\nstage = 'Halved'\n[[stage]]\nstage = 'Halved'", r"run.toml: .*unknown option 'stage'"),
        ("hccl_timeout = 'x'\n[[stages]]\nstage = 'Halved'", "run.toml:1: key hccl_timeout: "),
    ],
)
def test_a_file_that_says_something_else_is_refused_with_its_line(tmp_path, text, located):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises((TypeError, ValueError), match=located) as refused:
        NPURunConfig.from_file(path)
    assert len(str(refused.value)) < 500


@in_graph
def test_bytes_that_are_sent_without_and_with_stages():
    def sent(ranks, *added, **settings):
        pipeline = stages.pipeline("bytes", is_distributed=True, stages=added, **settings)
        return sum_sent_bytes(list_stages(pipeline, ranks), ranks)

    assert [ring_all_reduce_bytes(ranks) for ranks in (1, 2, 4)] == [0, 4, 6]
    assert sent(1, stages.Accumulate(4)) == 0
    assert sent(4, stages.ClipByValue(1.0)) == 6
    assert sent(2, wire="float16") == 2
    assert sent(4, stages.Accumulate(4)) == 1.5
    assert sent(4, stages.TopK(0.01)) == pytest.approx(3 * 0.01 * 8)
    assert sent(4, stages.TopK(0.5)) == 6  # as a whole
    assert sent(2, stages.TopK(0.01), stages.Accumulate(2)) == pytest.approx(0.01 * 8 / 2)
    assert sent(4, stages.Accumulate(4), stages.Threshold(0.1)) is None
    assert sent(4, stages.Adasum()) == 6
    assert sent(4, stages.PartialSync(100)) is None
    alone = stages.pipeline("alone", stages=[stages.Accumulate(4)])
    assert "sends" not in stages.explain(alone, ranks=4)


def explained(*arguments):
    return CliRunner().invoke(explain, list(map(str, arguments)))


def test_the_command_tells_and_draws_what_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.chdir(REPOSITORY)
    command = re.search(r"^npu-run explain (.*)$", (REPOSITORY / "docs" / "stages.md").read_text(), re.MULTILINE)
    picture = tmp_path / "stages.svg"
    told = explained(*command.group(1).replace("stages.svg", str(picture)).split())
    assert told.exit_code == 0, told.output
    lines = told.output.splitlines()
    names = ["LossScaling", "Accumulate", "TopK", "OverflowCheck", "ClipByGlobalNorm", "CentralizeGradients"]
    assert [line.split("(")[0].split()[-1] for line in lines[:6]] == names
    assert "sends 1.5 instead of 6 bytes per parameter" in lines[1]
    assert "sends 0.06 instead of 1.5 bytes per parameter" in lines[2]
    assert lines[-1] == "For a batch, each of 4 ranks sends 6.6 MB; 660 MB without stages."
    assert picture.read_text() == (REPOSITORY / "docs" / "stages.svg").read_text(), "run the command of docs/stages.md"
    root = ElementTree.fromstring(picture.read_text())
    drawn = [element.get("data-stage") for element in root.iter() if element.get("class") == "stop"]
    assert drawn == [*names, "NarrowVariableGuard"]
    bars = {
        kind: [float(element.get("width")) for element in root.iter() if element.get("class") == kind]
        for kind in ("before", "sent")
    }
    assert bars["sent"][0] / bars["before"][0] == pytest.approx(1.5 / 6, rel=0.01)
    assert bars["before"][1] == bars["sent"][0] > bars["sent"][1] > 0


def test_the_command_without_stages_on_one_rank_and_on_files_that_are_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    path = tmp_path / "run.toml"
    path.write_text("save_checkpoints_steps = 5\n")
    assert "sends 4 MB; 4 MB without stages." in explained(path).output
    facts = json.loads(explained(path, "--json").stdout)
    assert (facts["verdict"], facts["ranks"], facts["sent_bytes"]) == ("fine", 2, 4e6)
    assert [stage["name"] for stage in facts["stages"]][:3] == ["LossScaling", "AllReduce", "OverflowCheck"]
    assert "One rank sends nothing." in explained(path, "--ranks", 1).output
    path.write_text("[[stages]]\nstage = 'Threshold'\nvalue = 0.5\n")
    drawn = explained(path, "--out", tmp_path / "threshold.svg")
    assert drawn.output.splitlines()[-1].startswith("For a batch, each of 2 ranks sends bytes that depend on")
    assert "4 before; with this stage it depends" in (tmp_path / "threshold.svg").read_text()
    path.write_text("[[stages]]\nstage = 'TopK'\ndensity = 0.1\n[[stages]]\nstage = 'Threshold'\nvalue = 0.5\n")
    for arguments, part in (
        ([path], "TopK, Threshold. Keep one"),
        ([tmp_path / "none.toml"], "none.toml"),
        ([path, "--params", "many"], "--params"),
    ):
        refused = explained(*arguments)
        assert refused.exit_code == 2 and refused.output.startswith("npu-run explain: ") and part in refused.output
        assert len(refused.output.splitlines()) == 1


CLIPS = "[[stages]]\nstage = 'ClipByGlobalNorm'\nclip_norm = 1.0"


@pytest.mark.parametrize(
    ("text", "ranks", "switch", "told"),
    [
        ("iterations_per_loop = 10", 2, "", "Steps overlap where ranks wait for the network for at least 10% of"),
        ("iterations_per_loop = 10", 2, "1", "Steps overlap, as NPU_OVERLAPPED_STEPS=1 asks for it."),
        ("iterations_per_loop = 10", 2, "0", "Steps do not overlap: NPU_OVERLAPPED_STEPS=0 turns it off."),
        ("iterations_per_loop = 10", 1, "", "Steps do not overlap: one rank sends nothing."),
        ("iterations_per_loop = 4", 2, "", "iterations_per_loop=4 is too short: it takes more than 4."),
        ("iterations_per_loop = 10\nprecision_mode = 'allow_mix_precision'", 2, "", "chosen at every run."),
        (f"iterations_per_loop = 10\n{CLIPS}", 2, "", "ClipByGlobalNorm needs all reduced gradients"),
        ("iterations_per_loop = 10\n[[stages]]\nstage = 'TopK'\ndensity = 0.1", 2, "", "TopK does not all-reduce"),
        ("iterations_per_loop = 10\n[[stages]]\nstage = 'PartialSync'", 2, "", "no stage reduces gradients"),
        ("iterations_per_loop = 1", 2, "1", None),
    ],
)
def test_the_command_tells_whether_steps_overlap_and_why(tmp_path, monkeypatch, text, ranks, switch, told):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setenv("NPU_OVERLAPPED_STEPS", switch)
    path = tmp_path / "run.toml"
    path.write_text(f"save_checkpoints_steps = 20\n{text}\n")
    output, facts = explained(path, "--ranks", ranks).output, explained(path, "--ranks", ranks, "--json").stdout
    assert json.loads(facts)["overlapping_steps"] == (told and output.splitlines()[-1])
    assert told in output.splitlines()[-1] if told else "overlap" not in output


@pytest.mark.parametrize("is_lowered, words", [(True, ""), (False, ", imitated")])
def test_the_command_tells_in_which_precision_steps_compute(tmp_path, monkeypatch, is_lowered, words):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setattr(rewriter, "can_lower", lambda dtype: is_lowered)
    path = tmp_path / "run.toml"
    path.write_text("precision_mode_v2 = 'mixed_bfloat16'\n")
    assert f"Precision: mixed bfloat16{words}." in explained(path).output.splitlines()
    assert json.loads(explained(path, "--json").stdout)["precision"] == f"Precision: mixed bfloat16{words}."
    path.write_text("save_checkpoints_steps = 20\n")
    assert "Precision:" not in explained(path).output
