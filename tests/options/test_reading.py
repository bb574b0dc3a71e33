"""Both ways of giving an option mean the same."""

from __future__ import annotations

import re

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import npu_config
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.options import (
    OPTIONS,
    make_session_config,
    parameter_values,
    read_run_config,
    read_session_config,
    with_optimizer_entry,
)
from npu_bridge.options.table import SESSION
from tests.documented.helper_config_facts import SESSION_KEYS, SESSION_VALUES
from tests.options.conftest import slots
from tests.refusing import refuses

ANY_VALUE = {"s": "text", "i": 1, "b": True}


def _session(**values):
    return with_optimizer_entry(None, values)


def test_there_are_108_documented_session_keys_and_no_others():
    assert sorted(row[0] for row in SESSION_KEYS) == sorted(option.key for option in OPTIONS if option.key)
    assert len(SESSION_KEYS) == 108


def test_keys_have_their_slots_and_absent_values_and_some_are_written_by_default():
    absent, written = read_session_config(None), parameter_values(NPURunConfig())
    found = []
    for key, *_ in SESSION_KEYS:
        option = OPTIONS.option_by_key(key)
        found.append((key, option.kind.session_field, absent[option.name], option.name, key in written))
    assert list(map(repr, found)) == list(map(repr, SESSION_KEYS))


def _legal(key, slot):
    values = SESSION_VALUES.get(key, ([ANY_VALUE[slot]], []))[0]
    return [(key, value) for value in values]


_COMPANIONS = {
    "modify_mixlist": {"precision_mode_v2": "mixed_float16"},
    "optypelist_for_implmode": {"op_select_implmode": "high_precision"},
    "in_out_pair": {"mix_compile_mode": True},
    "profiling_mode": {"profiling_options": "{}"},
    "enable_dump": {"dump_path": "."},
    "enable_dump_debug": {"dump_path": "."},
    "input_shape": {"dynamic_dims": "1;2", "dynamic_node_type": 1},
    "dynamic_dims": {"input_shape": "a:-1", "dynamic_node_type": 1},
    "dynamic_node_type": {"input_shape": "a:-1", "dynamic_dims": "1;2"},
    "compile_hybrid_mode": {"input_shape": "a:-1", "dynamic_dims": "1;2", "dynamic_node_type": 1},
}
_SPECIAL_TEXTS = {"input_shape": "a:-1", "dynamic_dims": "1;2", "graph_compiler_cache_dir": "."}


@pytest.mark.parametrize("key, value", [case for row in SESSION_KEYS for case in _legal(row[0], row[1])])
def test_legal_session_value_is_read(key, value):
    value = _SPECIAL_TEXTS.get(key, value)
    options = read_session_config(_session(**{**_COMPANIONS.get(key, {}), key: value}))
    expected = max(0, min(value, 33554432)) if key == "input_fusion_size" else value
    assert options[OPTIONS.option_by_key(key).name] == expected


@pytest.mark.parametrize("key, value", [(key, value) for key, row in SESSION_VALUES.items() for value in row[1]])
def test_illegal_session_value_is_a_value_error_naming_the_key(key, value):
    with pytest.raises(ValueError, match=f"NpuOptimizer parameter_map: {key} "):
        read_session_config(_session(**{key: value}))


@refuses(
    ValueError,
    ({"precision_mode_v2": "fp16", "experimental_accelerate_train_mode": "fast|step"}, "accelerate_train_mode"),
    ({"enable_dump": True}, "dump_path"),
    ({"enable_dump_debug": True}, "dump_path"),
    ({"enable_dump": True, "enable_dump_debug": True}, "enable_dump_debug"),
    ({"enable_dump": True, "dump_path": "/no/such/directory"}, "dump_path"),
    ({"enable_compress_weight": False, "compress_weight_conf": "w"}, "compress_weight_conf"),
    ({"input_shape": "a:-1"}, "input_shape"),
    ({"dynamic_dims": "1;2", "dynamic_node_type": 1}, "dynamic_dims"),
    ({"input_shape": "a:-1", "dynamic_dims": "1,2;3,4", "dynamic_node_type": 1}, "dynamic_dims"),
    ({"input_shape": "a:-1", "dynamic_dims": "1;3,4", "dynamic_node_type": 1}, "dynamic_dims"),
    ({"compile_hybrid_mode": 1}, "compile_hybrid_mode"),
    ({"in_out_pair": "[[a, b]]"}, "in_out_pair"),
    ({"profiling_mode": True, "profiling_options": "{"}, "profiling_options"),
    ({"mix_compile_mode": True, "iterations_per_loop": 2}, "iterations_per_loop"),
    ({"graph_compiler_cache_dir": "/no/such/directory"}, "graph_compiler_cache_dir"),
)
def test_forbidden_combination_in_a_session(values):
    read_session_config(_session(**values))


@pytest.mark.parametrize(
    "key, near",
    [("precision_mod", "precision_mode"), ("enable_profiling", "profiling_mode"), ("Jit_compile", "jit_")],
)
def test_unknown_key_warns_once_with_the_nearest_key(key, near, caplog):
    config = slots((key, "i", 1), ("debug_dir", "s", b"here"))
    for _ in range(2):
        assert read_session_config(config).debug_dir == "here"
        assert read_run_config(NPURunConfig(session_config=config)).debug_dir == "here"
    assert len(re.findall(f"unknown option '{key}'.*'{near}", caplog.text)) == 1


@pytest.mark.parametrize(
    "key, slot, value, read",
    [
        ("precision_mode", "b", True, None),  # means nothing there
        ("precision_mode", "i", 3, None),
        ("dump_step", "i", 5, "5"),
        ("aoe_mode", "i", 2, "2"),
        ("HCCL_algorithm", "b", True, "true"),
        ("quant_dumpable", "b", True, None),  # "0" or "1"
        ("enable_dump", "i", 1, True),
        ("enable_dump", "s", b"True", True),
        ("hcom_parallel", "s", b"false", False),
        ("hcom_parallel", "i", 7, True),  # its default
        ("iterations_per_loop", "s", b"10", 10),
        ("iterations_per_loop", "f", 10.0, 10),
        ("iterations_per_loop", "f", 10.5, 1),
        ("iterations_per_loop", "f", float("inf"), 1),
        ("iterations_per_loop", "i", 0, ValueError),  # the right slot
        ("iterations_per_loop", "b", True, 1),
        ("deterministic", "b", True, 1),
        ("session_device_id", "s", b"-5", -1),  # its default
        ("session_device_id", "s", b"x" * 999, -1),
        ("jit_compile", "b", True, ValueError),  # strict on the NPU stack, too
        ("oo_constant_folding", "i", 0, True),  # left out there, too
    ],
)
def test_value_in_a_wrong_slot_is_taken_where_it_is_legal(key, slot, value, read, caplog, tmp_path):
    config = with_optimizer_entry(slots((key, slot, value)), {"dump_path": str(tmp_path)})
    if read is ValueError:
        with pytest.raises(ValueError, match=key):
            read_session_config(config)
        return
    options = read_session_config(config)
    assert options[OPTIONS.option_by_key(key).name] == read and type(options[OPTIONS.option_by_key(key).name]) is type(
        read
    )
    said = [record.getMessage() for record in caplog.records if f"{key} is in slot .{slot}" in record.getMessage()]
    assert len(said) == 1 and ("is left out" in said[0] or "It is read as" in said[0]) and len(said[0]) < 500


@pytest.mark.parametrize("key, slot, absent, name, sent", SESSION_KEYS)
def test_wrong_slot_warns_or_fails_and_names_the_key(key, slot, absent, name, sent, caplog):
    config = slots((key, "f", 1.5))
    if key in ("jit_compile", "shape_generalization_mode"):
        with pytest.raises(ValueError, match=key):
            read_session_config(config)
        return
    try:
        options = read_session_config(config)
    except ValueError as error:  # a combination: a text that takes any value took "1.5"
        assert slot == "s" and key in str(error)
    else:
        assert slot == "s" or options[name] == absent
    assert f"{key} is in slot .f of its AttrValue. Expected slot .{slot}" in caplog.text


def test_last_entry_wins_for_each_key_and_other_entries_are_ignored():
    config = with_optimizer_entry(_session(debug_dir="first", deterministic=1), {"debug_dir": "second"})
    other = config.graph_options.rewrite_options.custom_optimizers.add(name="Other")
    other.parameter_map["unheard_of"].i = 1
    options = read_session_config(config)
    assert (options.debug_dir, options.deterministic) == ("second", 1)


def test_session_only_options_are_part_of_the_value():
    options = read_run_config(NPURunConfig())
    assert all(option.name in options for option in OPTIONS.options_of(SESSION))


def test_task_comes_from_tf_config(monkeypatch):
    config = NPURunConfig()
    monkeypatch.setenv("TF_CONFIG", '{"task": {"type": "worker", "index": 3}}')
    values = parameter_values(config)
    assert (values["job"], values["task_index"]) == ("worker", 3)


def test_variables_speak_where_nobody_else_does(monkeypatch):
    monkeypatch.setenv("AOE_MODE", "2")
    monkeypatch.setenv("PROFILING_MODE", "true")
    monkeypatch.setenv("PROFILING_OPTIONS", '{"output": "here"}')
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "99")
    options = read_run_config(NPURunConfig(hccl_timeout=5))
    assert (options.aoe_mode, options.enable_profiling, options.hccl_timeout) == ("2", True, 5)
    assert options.profiling_options == '{"output": "here"}'
    silent = read_run_config(NPURunConfig(profiling_config=npu_config.ProfilingConfig(False), aoe_mode="1"))
    assert (silent.aoe_mode, silent.enable_profiling, silent.hccl_timeout) == ("1", False, 99)
    monkeypatch.setenv("AOE_MODE", "3")
    with pytest.raises(ValueError, match="aoe_mode"):
        NPURunConfig()


def test_inference_implies_small_channels():
    assert read_run_config(NPURunConfig(graph_run_mode=0)).enable_small_channel == 1


def test_profiling_options_have_a_default_when_on():
    options = read_run_config(NPURunConfig(profiling_config=npu_config.ProfilingConfig(True)))
    assert '"output":"./"' in options.profiling_options


def test_value_is_immutable_and_names_near_options():
    options = read_session_config(None)
    with pytest.raises(AttributeError, match="replace"):
        options.deterministic = 1
    with pytest.raises(AttributeError, match="Did you mean 'deterministic'"):
        _ = options.determinstic
    changed = options.replace(deterministic=1)
    assert (changed.deterministic, options.deterministic) == (1, 0)
    assert hash(changed) != hash(options) or changed != options
    with pytest.raises(AttributeError, match="no option"):
        options.replace(unheard_of=1)


def test_caller_proto_is_not_changed_by_reading_or_writing():
    config = _session(debug_dir="x")
    before = config.SerializeToString(deterministic=True)
    read_session_config(config)
    with_optimizer_entry(config, {"deterministic": 1})
    assert config.SerializeToString(deterministic=True) == before


def test_stock_session_runs_with_the_entry():
    config = make_session_config(NPURunConfig())
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        assert session.run(tf.constant(2) * 3) == 6


def test_bytes_that_are_no_text_are_refused_by_key():
    for option in OPTIONS:
        if option.key and option.kind.session_field == "s":
            with pytest.raises(ValueError, match=option.key):
                read_session_config(slots((option.key, "s", b"\xff\xfe")))
