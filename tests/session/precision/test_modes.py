from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from npu_bridge.base.machine import missing_cpu_units
from npu_bridge.options import read_session_config, with_optimizer_entry
from npu_bridge.options.table_precision import PRECISION_MODES, PRECISION_MODES_V2
from npu_bridge.session.precision import Precision, rewriter
from npu_bridge.session.precision.mixlist import Mixlist
from npu_bridge.session.precision.modes import ORIGINAL, Policy, configured_policy, only_permits_float16
from npu_bridge.session.precision.rewriter import RewriterLists, make_rewriter_lists

POLICIES = {
    "must_keep_origin_dtype": ORIGINAL,
    "allow_fp32_to_bf16": ORIGINAL,
    "force_fp16": Policy("all", "float16"),
    "force_fp32": Policy("matrix", "float16"),
    "cube_fp16in_fp32out": Policy("matrix", "float16"),
    "allow_mix_precision_fp16": Policy("mixed", "float16"),
    "allow_mix_precision": Policy("mixed", "float16"),
    "allow_mix_precision_bf16": Policy("mixed", "bfloat16"),
    "origin": ORIGINAL,
    "fp16": Policy("all", "float16"),
    "mixed_float16": Policy("mixed", "float16"),
    "mixed_bfloat16": Policy("mixed", "bfloat16"),
}
REFUSED = ("mixed_hif8", "cube_hif8")


def options(**keys):
    return read_session_config(with_optimizer_entry(None, keys))


def test_every_mode_has_a_policy():
    assert {*POLICIES, *REFUSED, "allow_fp32_to_fp16"} == {*PRECISION_MODES, *PRECISION_MODES_V2}


@pytest.mark.parametrize("key, modes", [("precision_mode", PRECISION_MODES), ("precision_mode_v2", PRECISION_MODES_V2)])
@pytest.mark.parametrize("gains", [True, False])
def test_policies(key, modes, gains):
    for mode in set(modes) & set(POLICIES):
        assert configured_policy(options(**{key: mode}), gains) == POLICIES[mode]
        assert not only_permits_float16(options(**{key: mode}))


def test_a_permission_is_used_where_it_gains():
    assert configured_policy(options(), True) == ORIGINAL
    permitted = options(precision_mode="allow_fp32_to_fp16")
    assert only_permits_float16(permitted)
    assert configured_policy(permitted, gains_from_float16=True) == Policy("matrix", "float16")
    assert configured_policy(permitted, gains_from_float16=False) == ORIGINAL


def test_bfloat16_on_a_gpu_is_imitated(monkeypatch):
    """TensorFlow's rewriter knows float16 alone there."""
    monkeypatch.setattr(rewriter, "main_device_kind", lambda: "GPU")
    for keys in ({"precision_mode_v2": "mixed_bfloat16"}, {"experimental_accelerate_train_mode": "fast1|step"}):
        precision, config = Precision(options(**keys)), tf.compat.v1.ConfigProto()
        precision.prepare(config)
        assert (precision.is_active, precision.imitation is None, config.ByteSize()) == (True, False, 0)
    precision, config = Precision(options(precision_mode_v2="mixed_float16")), tf.compat.v1.ConfigProto()
    precision.prepare(config)
    assert config.graph_options.rewrite_options.auto_mixed_precision == RewriterConfig.ON
    assert configured_policy(options(precision_mode="allow_fp32_to_fp16"), True).reach == "matrix"


@pytest.mark.parametrize("mode", REFUSED)
def test_dtypes_that_do_not_exist(mode):
    with pytest.raises(ValueError, match="hifloat8"):
        options(precision_mode_v2=mode)


def test_an_asked_type_beats_mode_and_mixlist():
    mixlist = Mixlist(frozenset({"Relu"}), frozenset({"Tanh"}), frozenset({"Exp"}))
    asked = {"Relu": "float32", "Tanh": "float16", "Exp": "float32"}
    lists = make_rewriter_lists(Policy("mixed", "float16"), [], mixlist, asked)
    assert lists == RewriterLists(allow=frozenset({"Tanh"}), deny=frozenset({"Relu", "Exp"}))


@pytest.mark.parametrize(
    "low_dtype, description, is_missing",
    [
        ("float16", "flags\t: fpu avx512f avx512_bf16", True),
        ("float16", "flags : avx512_fp16", False),
        ("bfloat16", "flags : amx_bf16", False),
        ("bfloat16", "flags : avx512f", True),
        ("bfloat16", "Features : asimd", False),
    ],
)
def test_units_of_the_processor(low_dtype, description, is_missing):
    assert (missing_cpu_units(low_dtype, f"processor : 0\n{description}\n") is not None) == is_missing
