"""`npu-run effects`: what the options of a file, a script and a training do here, and the JSON of all commands."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from click.testing import CliRunner

from npu_run.commands import find_command
from tests.npu_run.launching import ROOT, write_script
from tests.reporting.test_page import write_history

CONFIG = """
save_checkpoints_steps = 7
op_debug_level = 1
compress_weight_conf = "weights.conf"
precision_mod = "x"

[dump_config]
enable_dump_debug = true
dump_path = 5

[[stages]]
stage = "Accumulate"
steps = 2
"""
SCRIPT = """
from npu_bridge.npu_init import *
config = NPURunConfig(save_checkpoints_steps=5, op_debug_level=1, dump_config=DumpConfig(True, "."))
custom_op.parameter_map["precision_mode"].s = b"allow_mix_precision"
custom_op.parameter_map["no_such_option"].i = 1
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs `npu-run effects`, or another command, in a folder with a file and a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    write_script(tmp_path, SCRIPT)

    def run(*words, command="effects"):
        return CliRunner().invoke(find_command(command), [str(word) for word in words])

    return run


def test_options_of_a_file_are_listed_by_what_they_do(run):
    told = run("run.toml")
    assert told.exit_code == 1
    refused, nothing, works, last = told.output.split("\n\n")
    for name in ("compress_weight_conf", "precision_mod  ", "dump_path"):
        assert name in refused
    assert "did you mean precision_mode?" in refused and "5" in refused
    assert nothing.startswith("no effect here\n  NPURunConfig.op_debug_level  1  ")
    assert "NPURunConfig.save_checkpoints_steps  7 " in works and "DumpConfig.enable_dump_debug" in works
    assert last == "run.toml: 6 options set: 2 work, 1 without effect, 3 refused.\n"
    assert "work here" not in run("-q", "run.toml").output


def test_options_of_a_script_are_listed_with_their_lines(run, tmp_path):
    told = run("train.py")
    assert told.exit_code == 0
    for row in (
        "train.py:3: NPURunConfig.op_debug_level ",
        "train.py:5: no_such_option ",
        "train.py:4: NPURunConfig.pre",
    ):
        assert f"  {row}" in told.output, told.output
    assert told.output.endswith("train.py: 5 options set: 3 work, 2 without effect.\n")
    assert "Did you mean" not in told.output
    write_script(tmp_path, SCRIPT.replace("op_debug_level", "save_checkpoint_steps"), "misspelt.py")
    told = run("misspelt.py").output.partition("\n\n")[0]
    assert told.startswith("refused") and "Did you mean 'save_checkpoints_steps'?" in " ".join(told.split()), told
    write_script(tmp_path, "config = NPURunConfig.from_file('run.toml')\n", "of_file.py")
    assert "  run.toml: NPURunConfig.op_debug_level " in run("of_file.py").output
    write_script(tmp_path, "config = NPURunConfig.from_file(path)\n", "unknown.py")
    assert "give the model folder of a training.\nunknown.py: 0 options set." in run("unknown.py").output


def test_options_of_a_training_have_the_values_it_had(run, tmp_path):
    (tmp_path / "out").mkdir()
    rows = [["NPURunConfig.op_debug_level", "1", "None", "recorded: No kernel files are made."]]
    (tmp_path / "out" / "report.json").write_text(json.dumps({"options": rows}))
    facts = json.loads(run("--json", "out").output)
    assert facts["counts"] == {"refused": 0, "no effect": 1, "works": 0}
    assert facts["options"][0]["value"] == "1" and facts["options"][0]["effect"] == "no effect"
    (tmp_path / "none").mkdir()
    told = run("none")
    assert told.exit_code == 2 and "does not hold a training's options" in told.output


SPOKEN = {  # command: words, exit code
    "fine": [
        ("effects", ["--json", "train.py"]),
        ("check", ["--json", "train.py"]),
        ("plan", ["--json", "--params", "1M", "--bandwidth", "1Gbit"]),
        ("compare", ["--json", "a", "a"]),
    ],
    "no": [("effects", ["--json", "run.toml"]), ("check", ["--json", "bad.py"]), ("compare", ["--json", "a", "b"])],
    "unknown": [
        ("effects", ["--json", "none.toml"]),
        ("check", ["--json", "none.py"]),
        ("try", ["--json", "none.py"]),
        ("replay", ["--json", "none", "train.py"]),
        ("check", ["--json", "--nothing", "train.py"]),
        ("plan", ["--json", "--params", "many", "--bandwidth", "1Gbit"]),
        ("plan", ["--json"]),
        ("compare", ["--json", "a", "none"]),
        ("explain", ["--json", "none.toml"]),
        ("explain", ["--json"]),
    ],
}


@pytest.mark.parametrize("verdict", SPOKEN)
def test_json_has_a_verdict_that_is_the_exit_code_and_the_keys_of_the_page(verdict, run, tmp_path):
    write_script(tmp_path, "import npu_bridge.npu_init\nfrom npu_bridge.npu_init import nothing\n", "bad.py")
    for name, losses in {"a": [3.0, 2.0, 1.0], "b": [3.0, float("nan"), 1.0]}.items():
        write_history(str(tmp_path / name), losses)
    page = (pathlib.Path(ROOT) / "docs" / "commands.md").read_text()
    for command, words in SPOKEN[verdict]:
        told = run(*words, command=command)
        facts = json.loads(told.stdout)
        assert told.exit_code == list(SPOKEN).index(verdict), told.output
        assert (facts.pop("schema"), facts.pop("command"), facts.pop("verdict")) == (1, command, verdict)
        (row,) = re.findall(rf"^\| `{command}` \| (`.*) \|$", page, re.MULTILINE)
        known = {*re.findall(r"`(\w+)`", row), *(["problem"] if verdict == "unknown" else [])}
        assert facts and set(facts) <= known
        listed = [rows[0] for rows in facts.values() if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
        assert {key for row in listed for key in row} <= known
