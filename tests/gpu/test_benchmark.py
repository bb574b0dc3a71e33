"""The benchmark for GPUs runs, with small models, so that it works on the day there is a GPU."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow("for a GPU that most machines do not have")
BENCHMARK = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


def test_each_model_has_a_ratio():
    command = [sys.executable, str(BENCHMARK), "--small", "--rounds", "1", "--steps", "1"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert printed.count("steps/s") == 10 and printed.count("ratio NPUOptimizer, float16 / stock, float16") == 2
