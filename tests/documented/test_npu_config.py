"""NPURunConfig and its helper classes against the documented facts."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import pickle
from pathlib import Path

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import npu_config
from npu_bridge.estimator.npu.npu_config import DynamicInputConfig, ExperimentalConfig, NPURunConfig
from npu_bridge.estimator.npu.npu_session import decorate_sessions
from npu_bridge.options import (
    OPTIONS,
    make_session_config,
    read_run_config,
    read_session_config,
    with_optimizer_entry,
)
from npu_bridge.options.table import RUN_CONFIG
from tests.documented import run_config_facts as facts
from tests.documented.helper_config_facts import HELPER_PARAMETERS, HELPER_VALUES, REQUIRED
from tests.options.conftest import quiet_environment, slots  # noqa: F401 - the same quiet here
from tests.refusing import refuses

DYNAMIC = DynamicInputConfig("a:-1", "1;2", 1, 0)
STRATEGY = tf.compat.v1.distribute.experimental.ParameterServerStrategy


def _filled(value, directory):
    if isinstance(value, dict):
        return {key: _filled(inner, directory) for key, inner in value.items()}
    return str(directory) if value == "{directory}" else value


def _cases(values_by_name, which):
    return [
        pytest.param(name, case, id=f"{name}-{str(case)[:40]}")
        for name, row in values_by_name.items()
        for case in row[which]
    ]


def test_parameter_has_its_position_and_default():
    parameters = inspect.signature(NPURunConfig).parameters.values()
    found = [(parameter.name, parameter.default) for parameter in parameters]
    assert list(map(repr, found)) == [repr((name, default)) for name, default, _ in facts.RUN_CONFIG_PARAMETERS]
    assert len(found) == 88


def test_default_is_kept_under_its_attribute():
    expected = {attribute: default for _, default, attribute in facts.RUN_CONFIG_PARAMETERS if attribute}
    assert {attribute: getattr(NPURunConfig(), attribute) for attribute in expected} == expected


def test_all_parameters_can_be_given_by_position():
    defaults = [default for _, default, _ in facts.RUN_CONFIG_PARAMETERS]
    defaults[55] = 600
    assert NPURunConfig(*defaults)._hccl_timeout == 600


@pytest.mark.parametrize("name, value", _cases(facts.RUN_CONFIG_VALUES, 0))
def test_legal_value_is_accepted_and_kept_and_a_session_reads_the_same(name, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the files are that two options name
    Path("mixlist.json").write_text("{}")
    Path("dtypes.cfg").write_text("")
    value = _filled(value, tmp_path)
    config = NPURunConfig(**{**facts.NEEDS.get(name, {}), name: value})
    attribute = {row[0]: row[2] for row in facts.RUN_CONFIG_PARAMETERS}[name]
    if attribute:
        assert getattr(config, attribute) == value
    if OPTIONS[name].key:
        assert read_session_config(make_session_config(config)) == read_run_config(config)


@pytest.mark.parametrize("name", ["save_summary_steps", "save_checkpoints_steps", "keep_checkpoint_max"])
def test_a_whole_number_is_an_integer_for_all_who_count_with_it(name):
    assert repr(getattr(NPURunConfig(**{name: 1e3}), name)) == "1000"


@pytest.mark.parametrize("name, case", _cases(facts.RUN_CONFIG_VALUES, 1))
def test_illegal_value_raises_the_documented_type_and_names_the_option(name, case):
    value, error = case
    with pytest.raises(error, match=name) as raised:
        NPURunConfig(**{**facts.NEEDS.get(name, {}), name: value})
    assert type(raised.value) is error
    assert "Expected" in str(raised.value) and "got" in str(raised.value)


@pytest.mark.parametrize("name, arguments", facts.FORBIDDEN)
def test_forbidden_combination_names_the_option(name, arguments):
    with pytest.raises(ValueError, match=name):
        NPURunConfig(**arguments)


@pytest.mark.parametrize("arguments, first, error", facts.CHECK_ORDER)
def test_checks_run_in_the_documented_order(arguments, first, error):
    with pytest.raises(error, match=rf"NPURunConfig: {first} "):
        NPURunConfig(**arguments)


@pytest.mark.parametrize("mode, is_allowed", facts.ACCELERATED_FROM.items(), ids=str)
def test_acceleration_starts_from_some_modes_only(mode, is_allowed):
    arguments = {
        mode[0]: mode[1],
        "experimental_config": ExperimentalConfig(accelerate_train_mode="fast|step"),
    }
    if is_allowed:
        assert read_run_config(NPURunConfig(**arguments)).accelerate_train_mode == "fast|step"
    else:
        with pytest.raises(ValueError, match="accelerate_train_mode"):
            NPURunConfig(**arguments)


@pytest.mark.parametrize("given, kept", facts.CHECKPOINT_TRIGGERS)
def test_checkpoint_trigger(given, kept):
    config = NPURunConfig(save_checkpoints_steps=given[0], save_checkpoints_secs=given[1])
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs) == kept
    options = read_run_config(config)
    assert (options.save_checkpoints_steps, options.save_checkpoints_secs) == kept


@pytest.mark.parametrize("owner", HELPER_PARAMETERS)
def test_helper_signature(owner):
    parameters = inspect.signature(getattr(npu_config, owner)).parameters.values()
    expected = [(name, inspect.Parameter.empty if d is REQUIRED else d) for name, d, _ in HELPER_PARAMETERS[owner]]
    assert [(parameter.name, parameter.default) for parameter in parameters] == expected


@pytest.mark.parametrize("owner", [owner for owner in HELPER_PARAMETERS if owner != "DynamicInputConfig"])
def test_helper_keeps_defaults_under_their_attributes(owner):
    helper = getattr(npu_config, owner)()
    assert {attribute: getattr(helper, attribute) for _, _, attribute in HELPER_PARAMETERS[owner]} == {
        attribute: default for _, default, attribute in HELPER_PARAMETERS[owner]
    }


def _helper_cases(which):
    return [
        pytest.param(owner, name, case, row[2], id=f"{owner}-{name}-{str(case)[:40]}")
        for owner, values in HELPER_VALUES.items()
        for name, row in values.items()
        for case in row[which]
    ]


@pytest.mark.parametrize("owner, name, value, others", _helper_cases(0))
def test_helper_keeps_a_legal_value_and_a_session_reads_the_same(owner, name, value, others, tmp_path):
    helper = getattr(npu_config, owner)(**_filled({**others, name: value}, tmp_path))
    attribute = {row[0]: row[2] for row in HELPER_PARAMETERS[owner]}[name]
    assert getattr(helper, attribute) == _filled(value, tmp_path)
    if owner == "GraphMemoryOptimizeConfig":
        if name == "recompute":
            return  # a session has no key for it
        owner, helper = "ExperimentalConfig", ExperimentalConfig(graph_memory_optimize_config=helper)
    parameter = next(o.name for o in OPTIONS.options_of(RUN_CONFIG) if getattr(o.kind, "owner", None) == owner)
    config = NPURunConfig(**{parameter: helper})
    assert read_session_config(make_session_config(config)) == read_run_config(config)


@pytest.mark.parametrize("owner, name, case, others", _helper_cases(1))
def test_helper_refuses_an_illegal_value(owner, name, case, others, tmp_path):
    value, error = case
    with pytest.raises(error, match=f"{owner}: {name}") as raised:
        getattr(npu_config, owner)(**_filled({**others, name: value}, tmp_path))
    assert type(raised.value) is error


@pytest.mark.parametrize("field", ["dump_step", "dump_mode", "dump_debug_mode"])
def test_dump_fields_are_checked_while_the_dump_is_off(field):
    with pytest.raises(ValueError, match=f"DumpConfig: {field} .*'nonsense'"):
        npu_config.DumpConfig(**{field: "nonsense"})
    with pytest.raises(ValueError, match=f"parameter_map: {field} .*'nonsense'"):
        read_session_config(with_optimizer_entry(None, {field: "nonsense"}))


@pytest.mark.parametrize("is_on", [False, True])
def test_a_dump_may_name_a_directory_that_is_not_there_yet(is_on):
    assert npu_config.DumpConfig(enable_dump=is_on, dump_path="/no/such directory")._dump_path == "/no/such directory"


@pytest.mark.parametrize("name", ["modify_mixlist", "customize_dtypes"])
@pytest.mark.parametrize("is_session", [False, True])
def test_named_files_are_read_at_construction(name, is_session, tmp_path):
    path = str(tmp_path / "none")
    with pytest.raises(ValueError, match=f"{name} .*cannot be read.*No such file"):
        if is_session:
            decorate_sessions()
            tf.compat.v1.Session(config=with_optimizer_entry(None, {"precision_mode_v2": "mixed_float16", name: path}))
        else:
            NPURunConfig(precision_mode_v2="mixed_float16", **{name: path})


def test_keyword_of_older_stacks_is_left_out_with_one_warning(caplog):
    for _ in range(2):
        assert read_run_config(NPURunConfig(auto_tune_mode="RL,GA")) == read_run_config(NPURunConfig())
    assert caplog.text.count("auto_tune_mode is a keyword of older NPU stacks and is left out") == 1


@refuses(
    (lambda: DynamicInputConfig("a:-1", "1;2", 1), TypeError, "missing a required argument"),
    (lambda: NPURunConfig(dynamic_input_config=DYNAMIC, mix_compile_mode=True), ValueError, "mix_compile_mode"),
    (lambda: NPURunConfig(dynamic_input_config=DYNAMIC, compile_dynamic_mode=True), ValueError, "compile_dynamic"),
    (
        lambda: NPURunConfig(dynamic_input_config=DynamicInputConfig("a:-1", "1;2", 0, 1)),
        ValueError,
        "compile_hybrid_mode",  # which needs placeholders
    ),
    (lambda: NPURunConfig(precison_mode=1), TypeError, "Did you mean 'precision_mode"),
    (lambda: NPURunConfig(hccl_algorithm=1), TypeError, "Did you mean 'HCCL_algorithm"),
    (lambda: NPURunConfig(enable_dump=True), TypeError, "It belongs to DumpConfig"),
    (lambda: NPURunConfig().replace(hccl_timeout=5), ValueError, "hccl_timeout"),
    (lambda: NPURunConfig(distribute=STRATEGY()), ValueError, "distribute does not fit TF_CONFIG"),
)
def test_wrong_calls_are_told(make):
    make()


def test_incomplete_dynamic_input_is_left_out():
    NPURunConfig(dynamic_input_config=DynamicInputConfig("a:-1", "1;2", 1, 1))
    config = NPURunConfig(dynamic_input_config=DynamicInputConfig("a:-1", None, 1, 0))
    assert read_run_config(config).input_shape is None


def test_execute_placements():
    names = ["ALL", "CUBE", "VECTOR", "TAISHAN", "DVPP", "HOST"]
    assert [place.name for place in npu_config.NpuExecutePlacement] == names
    assert [place.value for place in npu_config.NpuExecutePlacement] == [name.lower() for name in names]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("experimental_distribute", None),
        ("device_fn", lambda op: "/cpu:0"),
        ("protocol", "grpc"),
        ("experimental_max_worker_delay_secs", 3),
        ("session_creation_timeout_secs", 60),
        ("checkpoint_save_graph_def", False),
    ],
)
def test_other_parameters_of_the_base_class_are_taken_as_there(name, value):
    given = {name: value}
    stock = tf.estimator.RunConfig(**given)
    read = getattr(stock, name, value)
    assert getattr(NPURunConfig(**given), name, value) == read
    assert name not in inspect.signature(NPURunConfig).parameters  # on an NPU it is unknown


_CLUSTER = {"chief": ["a:1"], "worker": ["a:2"], "ps": ["a:3"]}


@pytest.mark.parametrize(
    "tf_config, has_strategy, said",
    [
        ("{", False, "Expecting property name"),
        (json.dumps({"cluster": {"worker": ["a:1"]}}), False, "distribute does not fit TF_CONFIG"),
        (json.dumps({"cluster": _CLUSTER, "task": {"type": "chief", "index": 0}}), True, "mix_compile_mode"),
    ],
)
def test_a_tf_config_that_does_not_fit(monkeypatch, tf_config, has_strategy, said):
    monkeypatch.setenv("TF_CONFIG", tf_config)
    with pytest.raises(ValueError, match=said) as raised:
        NPURunConfig(distribute=STRATEGY() if has_strategy else None)
    assert type(raised.value) is (json.JSONDecodeError if tf_config == "{" else ValueError)


def test_strategies_are_passed_through():
    strategy = tf.compat.v1.distribute.OneDeviceStrategy("/cpu:0")
    assert NPURunConfig(train_distribute=strategy).train_distribute is strategy


def test_replace_copy_and_pickle_keep_every_option():
    config = NPURunConfig(precision_mode_v2="mixed_bfloat16", hccl_timeout=600, save_summary_steps=7)
    options = read_run_config(config)
    replaced = config.replace(model_dir="elsewhere")
    assert isinstance(replaced, NPURunConfig)
    assert read_run_config(replaced) == options.replace(model_dir="elsewhere")
    given = NPURunConfig(session_config=tf.compat.v1.ConfigProto(), hccl_timeout=600).replace(tf_random_seed=3)
    assert len(given.session_config.graph_options.rewrite_options.custom_optimizers) == 1
    assert read_session_config(given.session_config).hccl_timeout == 600
    assert read_run_config(copy.deepcopy(config)) == options
    assert read_run_config(pickle.loads(pickle.dumps(config))) == options


@pytest.mark.parametrize(
    "given, said",
    [
        ({"save_checkpoints_steps": 25, "iterations_per_loop": 10}, "Use 20 or 30, or set iterations_per_loop=1."),
        ({"op_debug_level": 9}, "op_debug_level has a value outside its range. Expected an integer in 0..4"),
        ({"shape_generalization_mode": "FULL"}, "shape_generalization_mode has no effect"),  # nothing is compiled
    ],
)
def test_what_is_taken_with_a_warning(given, said, caplog):
    NPURunConfig(**given)
    assert said in caplog.text


def test_seconds_with_several_ranks_warn(caplog, monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    NPURunConfig(save_checkpoints_secs=60)
    assert "save_checkpoints_secs is not meant for several ranks" in caplog.text


def test_option_without_effect_says_so_once_and_on_rank_zero_only(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("RANK_ID", "1")
    NPURunConfig(debug_dir="here")
    assert not caplog.records
    monkeypatch.setenv("RANK_ID", "0")
    for _ in range(3):
        NPURunConfig(debug_dir="here")
    assert [r.getMessage() for r in caplog.records if "debug_dir='here' is kept but has no effect" in r.getMessage()]
    assert len(caplog.records) == 1


def test_defaults_say_nothing(caplog):
    caplog.set_level(logging.INFO)
    NPURunConfig()
    assert [record for record in caplog.records if record.name.startswith("npu_bridge")] == []


def test_entry_in_session_config_is_read_and_the_object_wins(caplog):
    entries = ("debug_dir", "s", b"there"), ("deterministic", "i", 1)
    options = read_run_config(NPURunConfig(session_config=slots(*entries)))
    assert (options.debug_dir, options.deterministic) == ("there", 0)
    (warning,) = [record.getMessage() for record in caplog.records if "overrides" in record.getMessage()]
    assert "own deterministic overrides" in warning and "got 0 (int), and 1 (int) in the entry" in warning
    with pytest.raises(ValueError, match="precision_mode_v2"):
        NPURunConfig(session_config=slots(("precision_mode", "s", b"force_fp16")), precision_mode_v2="fp16")
