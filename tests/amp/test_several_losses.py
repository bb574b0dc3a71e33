"""Several losses with a loss scale each, on one rank, in every way to train."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.amp.loss_scale import DynamicLossScaleManager
from npu_bridge.amp.scaling import scale_loss, unscaled_gradients
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from tests import several_losses

tf1 = tf.compat.v1
Dynamic = DynamicLossScaleManager


@pytest.mark.parametrize("way", several_losses.WAYS)
def test_each_loss_has_its_own_scale_as_in_numpy(way):
    several_losses.assert_equals_numpy([several_losses.WAYS[way]()])


def two(first=2.0**4, second=2.0**10):
    return [Dynamic.apex(first, scale_window=2), Dynamic.apex(second, scale_window=2)]
