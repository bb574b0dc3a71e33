"""The first line of a run names back-end, devices, ranks and precision."""

from __future__ import annotations

import re

import tensorflow as tf

from npu_bridge.reporting import describe_run
from tests.rank_pool import on_each_rank


def test_one_process():
    line = describe_run("mixed bfloat16")
    version = re.escape(tf.__version__)
    assert re.fullmatch(rf"TensorFlow {version} \| .*\d+ CPU cores? \| one process \| precision: mixed bfloat16", line)


@on_each_rank(2)
def test_two_ranks():
    line = describe_run()
    assert "| 2 ranks | precision" in line and len(line) <= 80
