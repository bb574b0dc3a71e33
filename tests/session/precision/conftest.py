from __future__ import annotations

import pytest

from npu_bridge.session.precision import rewriter
from npu_bridge.session.precision.accelerate import VARIABLES


@pytest.fixture(autouse=True)
def no_progress_variables(monkeypatch):
    """Every test begins without, and leaves none."""
    for names in VARIABLES.values():
        for name in names:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)


@pytest.fixture(params=["kernels", "imitated"])
def bfloat16(request, monkeypatch):
    """The test runs with TensorFlow's bfloat16 kernels, and again as on a processor that TensorFlow has none for."""
    lowers = rewriter.can_lower
    if request.param == "imitated":
        monkeypatch.setattr(rewriter, "can_lower", lambda dtype: dtype != "bfloat16" and lowers(dtype))
    elif not lowers("bfloat16"):
        pytest.skip("TensorFlow does not lower to bfloat16 on this CPU")
    return request.param
