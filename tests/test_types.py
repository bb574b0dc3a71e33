"""A type checker knows the package: what is wrong in a script is found, and what is right is let through."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = """
from npu_bridge.npu_init import *
import hccl.manage.api as hccl
from npu_bridge.stages import Accumulate
import npu_device as npu

config = NPURunConfig(model_dir="out", precision_mode_v2="mixed_float16", session_config=tf.ConfigProto())
restored = NPURunConfig.from_file("run.toml", iterations_per_loop=10)
stages = [Accumulate(4)]
size = hccl.get_rank_size() + 1
NPURunConfig(precision_mode_v2="mixed_float61")  # wrong: Literal
NPURunConfig(iterations_per_lop=10)  # wrong: iterations_per_lop
NPURunConfig(save_checkpoints_steps="often")  # wrong: "int | None"
NPURunConfig(dump_config=ProfilingConfig())  # wrong: "DumpConfig | None"
DumpConfig(enable_dump="yes")  # wrong: "bool"
FixedLossScaleManager()  # wrong: loss_scale
hccl.create_group("pair", 2, [0, 1])
hccl.create_group("pair", 2, "01")  # wrong: "list[int]"
hccl.get_rank_id() + "1"  # wrong: int
"""


@pytest.mark.slow("mypy without its cache; make lint checks types")
def test_wrong_lines_are_found_and_right_ones_let_through(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed; `make venv` brings it")
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--config-file", str(REPOSITORY / "setup.cfg"), "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *options, str(tmp_path / "train.py")]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout
    found = {int(line): text for line, text in re.findall(r"train\.py:(\d+): error: (.*)", printed)}
    wanted = {
        number: line.partition("# wrong: ")[2]
        for number, line in enumerate(SCRIPT.splitlines(), 1)
        if "# wrong" in line
    }
    assert set(found) == set(wanted), printed
    assert [text for number, text in wanted.items() if text not in found[number]] == [], printed
