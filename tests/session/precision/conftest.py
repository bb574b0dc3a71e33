from __future__ import annotations

import pytest

from npu_bridge.session.precision.accelerate import VARIABLES
from tests.session.precision.small_models import (
    Dense,
    dtypes_of,
    precision_of,
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


@pytest.fixture(scope="session")
def has_bfloat16():
    """Skips on CPUs for which TensorFlow does not lower to bfloat16 (it wants AVX-512)."""
    model = Dense()
    with session_of(model.graph, precision_of(precision_mode_v2="mixed_bfloat16")) as session:
        session.run(model.init)
        nodes = run_with_graph(session, model.train_op, model.batch(0))[1]
    if "bfloat16" not in dtypes_of(nodes):
        pytest.skip("TensorFlow does not lower to bfloat16 on this CPU")
