from __future__ import annotations

import pytest

from npu_bridge.session.precision import kernels
from npu_bridge.session.precision.accelerate import VARIABLES
from npu_bridge.session.precision.rewriter import IMITATION
from tests.session.precision.small_models import (
    Dense,
    dtypes_of,
    precision_of,
    remember_speed,
    run_with_graph,
    session_of,
)


@pytest.fixture(autouse=True)
def no_progress_variables(monkeypatch):
    """Every test begins without, and leaves none."""
    for names in VARIABLES.values():
        for name in names:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def float16_kernels_are_faster(tmp_path_factory):
    """Float16 kernels, whatever this CPU is faster with, so that what computes in float16 can be counted."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.delenv(IMITATION, raising=False)
        remember_speed(folder, 1.0, 45.0)
        yield
    kernels.float16_speed.cache_clear()


@pytest.fixture(scope="session")
def has_bfloat16():
    """Skips on CPUs for which TensorFlow does not lower to bfloat16 (it wants AVX-512)."""
    model = Dense()
    with session_of(model.graph, precision_of(precision_mode_v2="mixed_bfloat16")) as session:
        session.run(model.init)
        nodes = run_with_graph(session, model.train_op, model.batch(0))[1]
    if "bfloat16" not in dtypes_of(nodes):
        pytest.skip("TensorFlow does not lower to bfloat16 on this CPU")
