"""Arguments of public constructors: numbers that cannot be meant, and misspelt names, are refused at construction."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import amp, boost, optimizers, reporting, stages
from npu_bridge.boost.config import SECTIONS
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import KerasDistributeOptimizer, NPUOptimizer
from npu_bridge.optimizers import rules
from npu_bridge.optimizers.subspace.basis import Basis

NO_NUMBERS = (math.nan, math.inf, -math.inf, True, "3", [1.0], np.array([1.0, 2.0]))
BELOW_0 = (*NO_NUMBERS, -1, -0.5)
NOT_ABOVE_0 = (*BELOW_0, 0)
NO_COUNT = (*NOT_ABOVE_0, 1.5)
Dynamic = amp.DynamicLossScaleManager
GROUPS = {"groups": ["a"]}
BASIS = {"basis": Basis(np.eye(2, dtype=np.float32))}
EXPONENTIAL = {"init_loss_scale": 8.0, "incr_every_n_steps": 5}
# Constructor, other arguments, and for each number a value that is not one.
NUMBERS = [
    (
        amp.configure,
        {},
        {
            "num_losses": NO_COUNT,
            "loss_scale": [value for value in NOT_ABOVE_0 if not isinstance(value, str)],  # texts are what APEX takes
            "dynamic_init_scale": NOT_ABOVE_0,
            "scale_growth_factor": (*NOT_ABOVE_0, 0.5),
            "scale_backoff_factor": (*NOT_ABOVE_0, 1.5),
            "scale_window": NO_COUNT,
            "min_loss_scale": NOT_ABOVE_0,
            "max_loss_scale": NOT_ABOVE_0,
        },
    ),
    (amp.initialize, {}, {"scale_window": NO_COUNT, "ddp_replica_count": NO_COUNT}),
    (
        Dynamic,
        {},
        {
            "init_loss_scale": NOT_ABOVE_0,
            "growth_factor": (*NOT_ABOVE_0, 0.5),
            "backoff_factor": (*NOT_ABOVE_0, 1.5),
            "growth_interval": NO_COUNT,
            "bad_steps": NO_COUNT,
            "min_loss_scale": NOT_ABOVE_0,
            "max_loss_scale": NOT_ABOVE_0,
        },
    ),
    (Dynamic.apex, {}, {"init_scale": NOT_ABOVE_0, "backoff_factor": (*NOT_ABOVE_0, 2), "scale_window": NO_COUNT}),
    (
        Dynamic.mindspore,
        {},
        {"init_loss_scale": NOT_ABOVE_0, "scale_factor": (*NOT_ABOVE_0, 0.5), "scale_window": NO_COUNT},
    ),
    (Dynamic.keras, {}, {"initial_scale": NOT_ABOVE_0, "dynamic_growth_steps": NO_COUNT}),
    (Dynamic.constant, {}, {"loss_scale": NOT_ABOVE_0}),
    (
        amp.GroupLossScaleManager,
        GROUPS,
        {
            "init": [value for value in NOT_ABOVE_0 if not isinstance(value, list)],  # one for each group
            "growth_factor": (*NOT_ABOVE_0, 0.5),
            "backoff_factor": (*NOT_ABOVE_0, 1.5),
            "growth_interval": NO_COUNT,
            "min_loss_scale": NOT_ABOVE_0,
            "max_loss_scale": NOT_ABOVE_0,
        },
    ),
    (FixedLossScaleManager, {}, {"loss_scale": (*NOT_ABOVE_0, 0.5)}),
    (
        ExponentialUpdateLossScaleManager,
        EXPONENTIAL,
        {
            "init_loss_scale": NOT_ABOVE_0,
            "incr_every_n_steps": NO_COUNT,
            "decr_every_n_nan_or_inf": NO_COUNT,
            "incr_ratio": (*NOT_ABOVE_0, 0.5),
            "decr_ratio": (*NOT_ABOVE_0, 1.5),
        },
    ),
    (stages.Accumulate, {}, {"steps": (*NO_COUNT, 2**31)}),
    (stages.Adasum, {}, {"averaged_ranks": NO_COUNT}),
    (stages.ClipByGlobalNorm, {}, {"clip_norm": (*NOT_ABOVE_0, 1e39)}),
    (stages.ClipByValue, {}, {"low": NOT_ABOVE_0}),
    (stages.ClipByValue, {"low": 1.0}, {"high": (*NO_NUMBERS, 1.0, 0.5)}),
    (stages.ClipLocally, {}, {"low": NOT_ABOVE_0}),
    (
        stages.FreezeSchedule,
        {},
        {
            "groups": [value for value in NO_COUNT if not isinstance(value, (list, np.ndarray))],
            "full_share": (*NOT_ABOVE_0, 1.5),
            "total_steps": NO_COUNT,
            "seed": (*BELOW_0, 1.5),
        },
    ),
    (stages.PartialSync, {}, {"threshold": NO_COUNT}),
    (stages.Threshold, {}, {"value": NOT_ABOVE_0}),
    (stages.TopK, {}, {"density": (*NOT_ABOVE_0, 1.5)}),
    (stages.SyncBeforeSavingHook, {}, {"save_steps": NO_COUNT}),
    (boost.CosineHead, {}, {"units": NO_COUNT}),
    (boost.CosineHead, {"units": 2}, {"multiplier": NO_NUMBERS}),
    (
        boost.SubspaceNewton,
        BASIS,
        {
            "rho": (*NOT_ABOVE_0, 1),
            "gamma": (*BELOW_0, 1),
            "alpha": BELOW_0,
            "sigma": (*NOT_ABOVE_0, 1),
            "trials": NO_COUNT,
        },
    ),
    (boost.compute_pca_basis, {"checkpoints": ["a"] * 40}, {"k": NO_COUNT, "seed": (*BELOW_0, 1.5)}),
    (reporting.LossScaleCollapseHook, {}, {"most_in_a_row": NO_COUNT}),
    (reporting.ProgressHook, {}, {"total_steps": NO_COUNT, "every_n_steps": NO_COUNT}),
]
NUMBERS += [(rule, {"learning_rate": 0.1}, dict.fromkeys(rule.hyper_names(), BELOW_0)) for rule in rules.ALL]


@pytest.mark.parametrize("make, others, numbers", NUMBERS, ids=lambda value: getattr(value, "__qualname__", ""))
def test_a_number_that_cannot_be_meant_is_refused_with_its_name_and_a_fix(make, others, numbers):
    passed, unclear = [], []
    for name, wrong in numbers.items():
        for value in wrong:
            try:
                make(**{**others, name: value})
                passed.append((name, value))
            except (TypeError, ValueError) as error:
                is_told = re.search(r"(?s): .+ Expected .+; got .+\. \S.*\.$", str(error)) and len(str(error)) < 500
                if name not in str(error) or not is_told:
                    unclear.append((name, value, str(error)))
    assert not passed and not unclear, f"passed: {passed}; unclear: {unclear}"


def test_numbers_of_the_sections_of_boost_are_finite():
    passed = []
    for section, keys in SECTIONS.items():
        for key, known in keys.items():
            if isinstance(known.default, (int, float)) and not isinstance(known.default, bool):
                for value in (*NO_NUMBERS, -1):
                    try:
                        boost.BoostConfig.from_dict({section: {key: value}})
                        passed.append((section, key, value))
                    except (TypeError, ValueError) as error:
                        assert f"{section}.{key}" in str(error)
    assert not passed


MISSPELT = [
    (stages.Accumulate, {"stpes": 4}, "steps"),
    (stages.TopK, {"densty": 0.1}, "density"),
    (stages.ClipByGlobalNorm, {"clipnorm": 1.0}, "clip_norm"),
    (stages.PartialSync, {"treshold": 1}, "threshold"),
    (stages.FreezeSchedule, {"total_step": 9}, "total_steps"),
    (rules.SGD, {"momentun": 0.9}, "momentum"),
    (optimizers.keras.LAMB, {"weight_deacy": 0.1}, "weight_decay"),
    (optimizers.keras.LAMB, {"clip_norm": 1.0}, "clipnorm"),
    (optimizers.keras_legacy.LAMB, {"lerning_rate": 0.1}, "learning_rate"),
    (optimizers.tf1.Adam, {"beta1": 0.9}, "beta_1"),
    (optimizers.Adam, {"fusde": True}, "fused"),
    (FixedLossScaleManager, {"los_scale": 8.0}, "loss_scale"),
    (ExponentialUpdateLossScaleManager, {"incr_every_n_step": 5}, "incr_every_n_steps"),
    (Dynamic, {"growth_intervall": 5}, "growth_interval"),
    (amp.configure, {"scale_windw": 5}, "scale_window"),
    (NPUOptimizer, {"is_distribute": True}, "is_distributed"),
    (KerasDistributeOptimizer, {"optimizer": None, "clip_norm": 1.0}, "clipnorm"),
]


class OfAUser(stages.Stage):
    def __init__(self, strength):
        self.strength = strength


@pytest.mark.parametrize("make, arguments, near", [*MISSPELT, (OfAUser, {"strenght": 1.0}, "strength")])
def test_a_misspelt_argument_is_told_with_the_nearest_one(make, arguments, near):
    wrong = list(arguments)[-1]
    with pytest.raises(TypeError, match=f"unknown argument '{wrong}'. Expected one of .*Did you mean '{near}'"):
        make(**arguments)


def test_positions_of_parameters_ascend_from_1():
    for make in (
        lambda starts: NPUOptimizer(tf.compat.v1.train.AdamOptimizer(), gradient_split_groups=starts),
        lambda starts: npu_keras_optimizer(tf.keras.optimizers.SGD(), gradient_split_groups=starts),
    ):
        for starts, kind in (
            ([], ValueError),
            ([0], ValueError),
            ([2, 2], ValueError),
            ([1.5], ValueError),
            (3, TypeError),
        ):
            with pytest.raises(
                kind, match="gradient_split_groups cannot be used. Expected a list of ascending positions"
            ):
                make(starts)
