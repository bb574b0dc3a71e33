"""The options that a training has changed are written to a file from which the same configuration is made."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.estimator.npu import npu_config
from npu_bridge.estimator.npu.npu_config import (
    DumpConfig,
    DynamicInputConfig,
    ExperimentalConfig,
    GraphMemoryOptimizeConfig,
    NPURunConfig,
    ProfilingConfig,
)
from npu_bridge.options import OPTIONS, read_run_config
from npu_bridge.options.as_toml import as_toml
from npu_bridge.options.kinds import HelperObject
from npu_bridge.options.table import REQUIRED, RUN_CONFIG

_VALUES = (True, False, 1, 7, 0.5, 'a "b"\\\n\té\x01\x7f', "1", b"text")


def needs(name):
    """A value for an argument that must be given."""
    return "1" if OPTIONS[name].kind.session_field == "s" else 1


def again(tmp_path, config, options=None, **overrides):
    """Returns the configuration made from the file of another one."""
    path = tmp_path / "run.toml"
    path.write_text(as_toml(config, options), encoding="utf-8")
    return NPURunConfig.from_file(path, **overrides)


def made(owner, name, value, **required):
    """A configuration with one option changed, None where its value is not legal."""
    try:
        helper = getattr(npu_config, owner)(**{**required, name: value})
        path = [o.name for o in OPTIONS if isinstance(o.kind, HelperObject) and o.kind.owner == owner]
        if owner == "GraphMemoryOptimizeConfig":
            path, helper = ["experimental_config"], ExperimentalConfig(graph_memory_optimize_config=helper)
        return helper if owner == RUN_CONFIG else NPURunConfig(**{path[0]: helper})
    except (TypeError, ValueError):
        return None


def test_every_option_comes_back_from_its_file(tmp_path):
    seen = set()
    plain = [option for option in OPTIONS if option.has_plain_value and hasattr(npu_config, option.owner)]
    for option in plain:
        needed = [o.name for o in OPTIONS.options_of(option.owner) if o.default is REQUIRED and o.name != option.name]
        for value in (*getattr(option.kind, "choices", ()), *_VALUES):
            config = made(option.owner, option.name, value, **{name: needs(name) for name in needed})
            if config is None or f"#   {option.name}: " in as_toml(config):
                continue
            back = again(tmp_path, config)
            assert read_run_config(back) == read_run_config(config), as_toml(config)
            assert repr(back) == repr(config).replace("b'text'", "'text'"), "but for bytes, which are texts there"
            seen.add(option.name)
    unseen = {option.name for option in plain} - seen
    assert len(unseen) < 15, sorted(unseen)  # those for which no value above is legal


def test_tables_in_tables_and_what_a_session_was_told(tmp_path):
    config = NPURunConfig(
        model_dir=str(tmp_path / "été"),
        save_checkpoints_secs=30,
        dump_config=DumpConfig(enable_dump=True, dump_path=str(tmp_path), dump_mode="all"),
        experimental_config=ExperimentalConfig(
            graph_memory_optimize_config=GraphMemoryOptimizeConfig(graph_slice="auto")
        ),
        profiling_config=ProfilingConfig(),
        dynamic_input_config=DynamicInputConfig("a:-1", "1;2", 0, 0),
    )
    assert repr(again(tmp_path, config)) == repr(config)
    options = read_run_config(config)
    assert read_run_config(again(tmp_path, None, options)) == options
    told = as_toml(None, {"hcom_parallel": False})
    assert "without parameters of tf.estimator.RunConfig" in told and told.endswith("hcom_parallel = false\n")
    assert as_toml().count("\n") == 2 and "= " not in as_toml()


def test_what_a_file_cannot_hold_is_a_comment(tmp_path):
    given = {"session_config": tf.compat.v1.ConfigProto(intra_op_parallelism_threads=3), "log_step_count_steps": None}
    config = NPURunConfig(tf_random_seed=3, model_dir="x" * 5000, **given)
    told = as_toml(config)
    assert "#   session_config: ConfigProto\n" in told and "#   log_step_count_steps: None\n" in told
    assert "#   model_dir: 'xxx" in told and max(map(len, told.splitlines())) < 120
    assert repr(again(tmp_path, config, model_dir="x" * 5000, **given)) == repr(config)


def test_stages_of_a_file_stay(tmp_path):
    first = tmp_path / "first.toml"
    first.write_text(
        'hccl_timeout = 5\n[[stages]]\nstage = "Accumulate"\nsteps = 4\n'
        '[[stages]]\nstage = "Freeze"\nschedule = { groups = [["a"], ["b c"]], total_steps = 9, full_share = 0.5 }\n'
    )
    config = NPURunConfig.from_file(first)
    back = again(tmp_path, config)
    assert [type(stage).__name__ for stage in back.stages] == ["Accumulate", "Freeze"]
    assert as_toml(back) == as_toml(config) and "steps = 4" in as_toml(back)
