"""Finds the GPU for these cases. `--on-cpu` runs them without one, so that they keep working until there is one."""

from __future__ import annotations

import os

import pytest

# Several processes share the GPU here: the ranks of a job, and the process of the tests.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


def pytest_addoption(parser):
    parser.addoption("--on-cpu", action="store_true", help="tests/gpu: run the cases on the CPU where there is no GPU")


@pytest.fixture(autouse=True)
def processor(request):
    """Returns "GPU", or "CPU" with `--on-cpu`; skips the case where neither is there."""
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        return "GPU"
    if not request.config.getoption("--on-cpu", default=False):
        pytest.skip("no GPU on this machine; `pytest tests/gpu --on-cpu` runs it on the CPU")
    return "CPU"


@pytest.fixture
def real_gpu(processor):
    """Skips a case about a property that only a GPU has."""
    if processor != "GPU":
        pytest.skip("only a GPU can show this: its memory, or which rank sees it")
