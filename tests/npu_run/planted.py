"""Small scripts with one mistake each: every option with a bad value, every documented function called wrongly."""

from __future__ import annotations

import importlib
import inspect
import math

from npu_bridge import npu_init
from npu_bridge.options import OPTIONS, kinds
from npu_bridge.options.table import RUN_CONFIG, SESSION
from tests.documented.test_arguments import MISSPELT, NUMBERS

_BEGIN = "from npu_bridge.npu_init import *\n"
_MODULES = (
    "npu_bridge.hccl.hccl_ops",
    "npu_bridge.estimator.npu_ops",
    "npu_bridge.estimator.npu_cpu_ops",
    "npu_bridge.estimator.npu_aicore_ops",
    "npu_bridge.estimator.npu_unary_ops",
    "npu_bridge.estimator.npu.npu_plugin",
    "npu_bridge.estimator.npu.npu_scope",
    "npu_bridge.estimator.npu.npu_rnn",
    "npu_bridge.estimator.npu.util",
    "npu_bridge.stages",
    "npu_bridge.amp",
    "hccl.manage.api",
    "hccl.split.api",
    "npu_device",
)
# Rules between options, and values inside other values.
_WRITTEN_OUT = {
    "two precision modes": "NPURunConfig(precision_mode='force_fp16', precision_mode_v2='fp16')",
    "two modes, unknown folder": (
        "folder = os.getcwd()\nNPURunConfig(model_dir=folder, precision_mode='force_fp16', precision_mode_v2='fp16')"
    ),
    "two modes of a session": (
        "config = tf.ConfigProto()\nop = config.graph_options.rewrite_options.custom_optimizers.add()\n"
        "op.name = 'NpuOptimizer'\nop.parameter_map['precision_mode'].s = tf.compat.as_bytes('force_fp16')\n"
        "op.parameter_map['precision_mode_v2'].s = 'fp16'.encode()\ntf.Session(config=config)"
    ),
    "two ends of a save": "NPURunConfig(save_checkpoints_steps=5, save_checkpoints_secs=5)",
    "loop and mixed": "LOOP = 10\nNPURunConfig(iterations_per_loop=LOOP, mix_compile_mode=True)",
    "dump without path": "NPURunConfig(dump_config=DumpConfig(enable_dump=True))",
    "options in a dictionary": "OPTIONS = {'precision_mod': 'force_fp16'}\nNPURunConfig(**OPTIONS)",
    "half of the dynamic dims": "NPURunConfig(dynamic_input_config=DynamicInputConfig('ND:-1', None, 0))",
    "weights twice": "NPURunConfig(enable_compress_weight=True, compress_weight_conf='x')",
    "acceleration": "NPURunConfig(accelerate_train_mode='fast', precision_mode='force_fp16')",
    "scale for a manager": "NPUOptimizer(tf.train.AdamOptimizer(0.1), loss_scale_manager=1024, is_loss_scale=True)",
    "no manager": "NPUOptimizer(tf.train.AdamOptimizer(0.1), is_loss_scale=True)",
    "wire": "NPUOptimizer(tf.train.AdamOptimizer(0.1), is_distributed=True, wire='fp16')",
    "keras wire": "npu_keras_optimizer(tf.keras.optimizers.legacy.SGD(0.1), wire='fp16')",
    "reduction": "hccl_ops.allreduce([1.0], 'mean')",
    "fusion": "hccl_ops.broadcast([tf.constant(1.0)], 0, fusion=1)",
    "shared manager": (
        "m = FixedLossScaleManager(2**3)\nNPUOptimizer(tf.train.AdamOptimizer(0.1), [m, m], is_loss_scale=True)"
    ),
    "wrapper twice": "npu_tf_optimizer(npu_tf_optimizer(tf.train.MomentumOptimizer(0.1, 0.9)))",
    "wrapper in a wrapper": (
        "inner = NPUDistributedOptimizer(tf.train.AdamOptimizer(1e-3))\nNPUOptimizer(inner, is_distributed=True)"
    ),
    "keras wrapper twice": "KerasDistributeOptimizer(npu_keras_optimizer(tf.keras.optimizers.legacy.SGD(0.1)))",
    "keras scale inside": (
        "scaled = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))\n"
        "npu_keras_optimizer(scaled)"
    ),
    "keras scale around": (
        "manager = FixedLossScaleManager(8)\n"
        "tf.keras.mixed_precision.LossScaleOptimizer(npu_keras_optimizer(tf.keras.optimizers.SGD(0.1), manager))"
    ),
    "split": "set_split_strategy_by_idx([3, 1])",
    "scope": "with npu_scope.limit_core_num_scope('many', 2):\n    pass",
    "profile": "profiler.Profiler(level='L7')",
    "apex": "from npu_bridge import amp\namp.initialize(scale_window=0)",
    "hook": "NPUOutputTensorHook(tensors=['x'])",
    "empty saver": "NPUCheckpointSaverHook('out')",
    "tpu keyword": "NPUEstimator(model_fn=print, config=NPURunConfig('out'), us_tpu=True)",
    "stock config": "NPUEstimator(model_fn=print, config=tf.estimator.RunConfig('out'))",
    "device option": "import npu_device\nnpu_device.global_options().precision_mod = 'x'",
    "device value": "import npu_device\nnpu_device.global_options().dump_config.dump_mode = 'inputs'",
    "misspelt name": "npu_keras_optimiser(1)",
    "misspelt import": "from npu_bridge.npu_init import NPUOptimiser",
    "misspelt attribute": "hccl_ops.all_reduce(1)",
}


def planted():
    for option in OPTIONS:
        for bad in _bad_values(option):
            if option.owner != SESSION:
                call = f"{option.owner}({option.name}={bad!r})"
                place = (
                    "" if option.owner in npu_init.__all__ else "from npu_bridge.estimator.npu.npu_config import *\n"
                )
                yield f"{option.owner}.{option.name}={bad!r}", f"{_BEGIN}{place}config = {call}\n"
            if option.key and option.kind.session_field in ("s", "i", "b"):
                yield f"parameter_map.{option.key}={bad!r}", _session(option.key, option.kind.session_field, bad)
    for option in OPTIONS.options_of(RUN_CONFIG):
        yield f"misspelt {option.name}", f"{_BEGIN}config = NPURunConfig({option.name}_=1)\n"
    for name in npu_init.__all__:
        yield from _wrong_calls("npu_bridge.npu_init", name)
    for module in _MODULES:
        found = importlib.import_module(module)
        for name in getattr(found, "__all__", None) or [name for name in vars(found) if name[0] != "_"]:
            yield from _wrong_calls(module, name)
    for make, others, numbers in NUMBERS:
        for name, values in numbers.items():
            for value in [each for each in values if _is_literal(each)][-2:]:
                yield from _call_of(make, {**others, name: value})
    for make, arguments, _ in MISSPELT:
        yield from _call_of(make, arguments)
    for name, text in _WRITTEN_OUT.items():
        yield name, f"{_BEGIN}{text}\n"


def _bad_values(option):
    """Returns values that its kind refuses, if there are any."""
    kind = option.kind
    of_kind = {
        kinds.Text: ("no such value", 5),
        kinds.Integer: ("many", 2**70, -5),
        kinds.OneOf: ("many", 77),
        kinds.Boolean: ("yes", 7),
        kinds.Number: (-1, "many"),
        kinds.Seed: (True, "many"),
        kinds.Directory: (5, ""),
        kinds.RawBytes: ("text", b"x"),
    }
    return of_kind.get(type(kind), (5,))


def _session(key, slot, bad):
    return (
        f"{_BEGIN}config = tf.ConfigProto()\n"
        f"custom_op = config.graph_options.rewrite_options.custom_optimizers.add()\n"
        f'custom_op.name = "NpuOptimizer"\n'
        f'custom_op.parameter_map["{key}"].{slot} = {bad.encode() if isinstance(bad, str) and slot == "s" else bad!r}\n'
        f"tf.Session(config=config).close()\n"
    )


def _wrong_calls(module, name):
    function = getattr(importlib.import_module(module), name)
    if not callable(function) or not getattr(function, "__module__", "").startswith(("npu_", "hccl")):
        return
    try:
        parameters = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return
    begin = f"from {module} import {name}\n"
    yield f"{module}.{name} misspelt", f"{begin}{name}({(parameters or ['x'])[-1]}_=1)\n"
    yield f"{module}.{name} too many", f"{begin}{name}({', '.join(['1'] * 20)})\n"


def _is_literal(value):
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str, list, tuple, dict))


def _call_of(make, arguments):
    if "." in make.__qualname__ and not inspect.ismethod(make) or not all(map(_is_literal, arguments.values())):
        return
    name = make.__qualname__.partition(".")[0]
    words = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    yield f"{make.__qualname__}({words})", f"from {make.__module__} import {name}\n{make.__qualname__}({words})\n"
