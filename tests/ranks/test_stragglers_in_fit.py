"""A rank that the others wait for in `model.fit` is named and shown in the report, in Keras 2 and 3."""

from __future__ import annotations

import contextlib
import io
import os

import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.tf_internals.names import HAS_ESTIMATORS
from npu_bridge.npu_init import FixedLossScaleManager, npu_callbacks_append, npu_keras_optimizer
from npu_bridge.reporting import History, ReportCallback, StragglerCallback
from npu_bridge.stages import Accumulate
from tests.ranks.test_stragglers import _SLOW, _STEPS, _batches, _never, _slow_always

pytestmark = pytest.mark.ranks(3)
_PAUSE_SECS = 0.25  # of the slow rank; a step of `fit` on three ranks takes up to 0.05 s on two busy cores
KERASES = ["tf.keras", *([] if HAS_ESTIMATORS else ["keras"])]


def _fit(name, is_slow, folder, stages=()):
    if name == "keras":
        import keras
    else:
        keras = tf.keras
    model = keras.Sequential([keras.layers.Input([8]), keras.layers.Dense(8), keras.layers.Dense(1)])
    optimizer = npu_keras_optimizer(keras.optimizers.SGD(0.01), FixedLossScaleManager(8.0), stages=list(stages))
    model.compile(optimizer, "mse", **({"jit_compile": False} if name == "keras" else {}))
    data = _batches(is_slow, more_secs=_PAUSE_SECS).map(lambda batch: (batch, batch[:, :1]))
    callbacks = npu_callbacks_append([ReportCallback(folder)])
    assert [type(each).__name__ for each in callbacks[1:3]] == ["StragglerCallback", "ReportCallback"]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        model.fit(data, steps_per_epoch=_STEPS, epochs=1, verbose=0, callbacks=callbacks)
    return [line for line in said.getvalue().splitlines() if "slow" in line]


@pytest.mark.slow("a pause of one rank is compared with times of three ranks that share two cores")
@pytest.mark.parametrize("stages", [(), (Accumulate(2),)], ids=["plain", "accumulate"])
@pytest.mark.parametrize("name", KERASES)
def test_a_rank_that_sleeps_in_its_input_is_named(on_ranks, tmp_path, name, stages):
    said, *others = on_ranks(3, _fit, name, _slow_always, str(tmp_path), stages)
    assert others == [[], []]
    (line,) = said
    assert line.startswith(f"npu_bridge: rank {_SLOW} is slow: its own work takes ") and "of the time for it" in line
    (found,) = History(os.path.join(tmp_path, "history.jsonl")).comparisons
    assert found.slow == [_SLOW] and found.own_ms[_SLOW] > 1.2 * max(found.own_ms[0], found.own_ms[2])
    page = (tmp_path / "report.html").read_text()
    assert "Own work and waiting" in page and "No rank was slow" not in page


@pytest.mark.slow("many steps with pauses; slow ranks are fast")
def test_equal_ranks_name_nobody(on_ranks, tmp_path):
    assert on_ranks(3, _fit, KERASES[-1], _never, str(tmp_path)) == [[]] * 3
    (found,) = History(os.path.join(tmp_path, "history.jsonl")).comparisons
    assert found.slow == [] and len(found.own_ms) == 3


def test_one_rank_is_compared_with_nobody():
    assert collective.current().size == 1
    assert not any(isinstance(each, StragglerCallback) for each in npu_callbacks_append([]))
