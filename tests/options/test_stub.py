"""Editors and type checkers know the constructors of NPURunConfig, and a config object says what was chosen."""

from __future__ import annotations

import ast
import inspect

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import npu_config
from npu_bridge.estimator.npu.npu_config import DumpConfig, NPURunConfig, ProfilingConfig
from npu_bridge.options import OPTIONS, read_run_config
from npu_bridge.options.table import RUN_CONFIG
from tools import make_stubs


def classes_of(stub):
    return {node.name: node for node in ast.parse(stub).body if isinstance(node, ast.ClassDef)}


def constructor_of(node):
    return next(member for member in node.body if getattr(member, "name", "") == "__init__")


def test_stub_equals_the_table():
    assert make_stubs.STUB.read_text(encoding="utf-8") == make_stubs.stub(), "run python tools/make_stubs.py"


def test_stub_has_the_constructors_of_the_running_program():
    found = classes_of(make_stubs.stub())
    assert set(found) == set(npu_config.__all__)
    for name, node in found.items():
        cls = getattr(npu_config, name)
        if hasattr(cls, "_declared_as"):
            arguments = constructor_of(node).args
            signature = inspect.signature(cls)
            assert [argument.arg for argument in arguments.args] == ["self", *signature.parameters]
            assert all(argument.annotation for argument in arguments.args[1:])
            defaults = [ast.literal_eval(default) for default in arguments.defaults]
            wanted = [p.default for p in signature.parameters.values() if p.default is not p.empty]
            assert defaults == wanted
        assert {member for member in vars(cls) if not member.startswith("_")} == {
            getattr(member, "name", None) or member.targets[0].id
            for member in node.body
            if isinstance(member, (ast.FunctionDef, ast.Assign)) and getattr(member, "name", "") != "__init__"
        }


def test_each_parameter_has_its_type_and_a_line_of_help():
    constructor = constructor_of(classes_of(make_stubs.stub())["NPURunConfig"])
    types = {argument.arg: ast.unparse(argument.annotation) for argument in constructor.args.args[1:]}
    assert types["precision_mode_v2"].startswith("Literal['origin', 'fp16'") and "hif8" not in str(types)
    assert types["iterations_per_loop"] == "int" and types["dump_config"] == "DumpConfig | None"
    assert types["model_dir"] == "str | bytes | os.PathLike[str] | None"
    help_lines = ast.get_docstring(constructor).splitlines()
    for option in OPTIONS.options_of(RUN_CONFIG):
        (line,) = [line for line in help_lines if line.startswith(f"  {option.name}: ")]
        assert line.endswith("No effect here.") == (option.effect.level == "recorded")


def test_repr_names_only_what_was_chosen():
    assert repr(NPURunConfig()) == "NPURunConfig()"
    assert repr(NPURunConfig(save_checkpoints_steps=100, keep_checkpoint_max=5)) == "NPURunConfig()"
    assert repr(NPURunConfig(model_dir="out", jit_compile="true")) == (
        "NPURunConfig(model_dir='out', jit_compile='true')"
    )
    assert repr(DumpConfig()) == "DumpConfig()"
    assert repr(NPURunConfig(model_dir="out").replace(save_summary_steps=7)) == (
        "NPURunConfig(model_dir='out', save_summary_steps=7)"
    )


@pytest.mark.parametrize(
    "given",
    [
        {"save_checkpoints_secs": 60},
        {"iterations_per_loop": 10, "save_checkpoints_steps": 20, "tf_random_seed": 0},
        {"dump_config": DumpConfig(enable_dump=True, dump_path="/tmp", dump_step="0|5"), "model_dir": "a  b"},
        {"profiling_config": ProfilingConfig(), "precision_mode_v2": "mixed_bfloat16"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_repr_makes_the_same_configuration_again(given):
    config = NPURunConfig(**given)
    again = eval(repr(config), vars(npu_config))
    assert repr(again) == repr(config) and all(f"{name}=" in repr(config) for name in given)
    options, options_again = read_run_config(config), read_run_config(again)
    plain = [option.name for option in OPTIONS if option.has_plain_value]
    assert [getattr(options, name) for name in plain] == [getattr(options_again, name) for name in plain]


def test_repr_holds_session_settings_in_one_short_line():
    settings = tf.compat.v1.ConfigProto(allow_soft_placement=True, device_count={f"CPU{n}": n for n in range(99)})
    text = repr(NPURunConfig(session_config=settings))
    assert text.startswith("NPURunConfig(session_config=device_count {") and "\n" not in text and len(text) < 300
