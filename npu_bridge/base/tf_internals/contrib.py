"""What TensorFlow 2.15.1 and Keras 2.15.0 keep of TensorFlow 1.15 under private names, for `tensorflow1_compat/`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

from npu_bridge.base.tf_internals.names import KERAS

if TYPE_CHECKING:
    import tensorflow as tf

_LEAST_EPSILON = 1.001e-5  # what cuDNN once asked for


def constant_shape(tensor: tf.Tensor) -> tf.TensorShape:
    """What is known of a shape tensor while a graph is made (`tensor_util.constant_value_as_shape`, TF 2.15)."""
    from tensorflow.python.framework import tensor_util

    return tensor_util.constant_value_as_shape(tensor)


def accept_whole_floats() -> None:
    """Lets a size be a whole float, `[3, 64 / 2]`, as in TensorFlow 1.15 (`tensor_shape.Dimension`, TF 2.15)."""
    from tensorflow.python.framework import tensor_shape

    original = tensor_shape.Dimension.__init__
    if getattr(original, "__wrapped__", None) is None:

        @functools.wraps(original)
        def whole(self: Any, value: Any) -> None:
            original(self, int(value) if isinstance(value, float) and value.is_integer() else value)

        tensor_shape.Dimension.__init__ = whole


def add_larger_epsilons() -> None:
    """Has batch normalisations that are fused add 1.001e-5 or more to a variance, as in TensorFlow 1.15.

    Only `nn_impl.fused_batch_norm` (TF 2.15), which Keras and TF-Slim call, sees the operator that does.
    """
    from tensorflow.python.ops import gen_nn_ops, nn_impl

    if nn_impl.gen_nn_ops is not gen_nn_ops:
        return
    stock = gen_nn_ops.fused_batch_norm_v3

    @functools.wraps(stock)
    def fused(*arguments: Any, epsilon: float, **options: Any) -> Any:
        return stock(*arguments, epsilon=max(epsilon, _LEAST_EPSILON), **options)

    nn_impl.gen_nn_ops = types.ModuleType(gen_nn_ops.__name__, gen_nn_ops.__doc__)
    nn_impl.gen_nn_ops.__dict__.update(vars(gen_nn_ops), fused_batch_norm_v3=fused)


def in_both_modes(method: Callable, **options: Any) -> Callable:
    """A test that runs in graph and in eager mode (`test_util.run_in_graph_and_eager_modes`, TF 2.15)."""
    from tensorflow.python.framework import test_util

    return test_util.run_in_graph_and_eager_modes(method, **options)


def moving_average_step(variable: Any, value: Any, decay: float, name: str) -> tf.Tensor:
    """A step of a moving average that does not begin at zero (`moving_averages.assign_moving_average`, TF 2.15)."""
    from tensorflow.python.training import moving_averages

    return moving_averages.assign_moving_average(variable, value, decay, name=name)


def updates_itself(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Returns whether an optimizer updates variables, and has no other do it (`Optimizer._resource_apply_dense`)."""
    import tensorflow as tf

    return type(optimizer)._resource_apply_dense is not tf.compat.v1.train.Optimizer._resource_apply_dense


def bounded_tensor_spec(shape: Any, dtype: Any, minimum: Any, maximum: Any, name: str | None) -> Any:
    """A tensor's shape, dtype and bounds (`tensor_spec.BoundedTensorSpec`, TF 2.15)."""
    from tensorflow.python.framework import tensor_spec

    return tensor_spec.BoundedTensorSpec(shape, dtype, minimum, maximum, name)


def smart_cond(predicate: Any, when_true: Callable, when_false: Callable, name: str | None) -> Any:
    """One branch where it is known which, else `tf.cond` (`smart_cond.smart_cond`, TF 2.15)."""
    from tensorflow.python.framework import smart_cond as module

    return module.smart_cond(predicate, when_true, when_false, name)


def smart_constant_value(predicate: Any) -> bool | None:
    """True or False where that is known while a graph is made (`smart_cond.smart_constant_value`, TF 2.15)."""
    from tensorflow.python.framework import smart_cond as module

    return module.smart_constant_value(predicate)


def remove_squeezable_dimensions(labels: Any, predictions: Any, name: str | None) -> tuple:
    """Labels and predictions of one rank (`confusion_matrix.remove_squeezable_dimensions`, TF 2.15)."""
    from tensorflow.python.ops import confusion_matrix

    return confusion_matrix.remove_squeezable_dimensions(labels, predictions, name=name)


def flatten_up_to(structure: Any, deeper: Any) -> list:
    """The parts of a structure where another one has its leaves (`util.nest.flatten_up_to`, TF 2.15)."""
    from tensorflow.python.util import nest

    return nest.flatten_up_to(structure, deeper)


def flat_element(element: Any) -> list:
    """The tensors of a dataset's element, for which a list is a tensor (`data.util.nest.flatten`, TF 2.15)."""
    from tensorflow.python.data.util import nest

    return nest.flatten(element)


def packed_element(element: Any, tensors: Sequence) -> Any:
    """Tensors in the structure of a dataset's element (`data.util.nest.pack_sequence_as`, TF 2.15)."""
    from tensorflow.python.data.util import nest

    return nest.pack_sequence_as(element, list(tensors))


def lookup_ops() -> types.ModuleType:
    """Functions that make tables and return them (`ops.lookup_ops.index_table_from_file` and others, TF 2.15)."""
    from tensorflow.python.ops import lookup_ops as module

    return module


def write_profile(profiler: Any, path: str) -> None:
    """Writes what a `tf.profiler.Profiler` has gathered (`Profiler._write_profile`, TF 2.15)."""
    profiler._write_profile(path)


def keras_loss_scale_optimizer() -> type:
    """Loss scaling of legacy Keras optimizers (`loss_scale_optimizer.LossScaleOptimizer`, Keras 2.15)."""
    return importlib.import_module(f"{KERAS}.src.mixed_precision.loss_scale_optimizer").LossScaleOptimizer


def modules_with_fewer_names() -> dict[types.ModuleType, tuple[str, ...]]:
    """Modules that TF-Slim 1.1 imports, and the names it misses in them (`framework.ops` and others, TF 2.15)."""
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import array_ops, control_flow_ops

    return {
        array_ops: ("stack", "unstack"),
        control_flow_ops: ("Assert", "case", "cond", "while_loop"),
        ops: ("IndexedSlices", "SparseTensor", "Tensor", "register_tensor_conversion_function"),
    }


def variable_scope_module() -> types.ModuleType:
    """The module of variable scopes, which TF-Slim 1.1 imports (`ops.variable_scope`, TF 2.15)."""
    from tensorflow.python.ops import variable_scope

    return variable_scope


def modules_of_layers() -> dict[types.ModuleType, types.ModuleType]:
    """By TensorFlow's own modules of TF 1 layers, those of Keras that work.

    Seen in TF 2.15: the modules in `tensorflow.python.layers` look for a package that need not be installed.
    """
    return {
        importlib.import_module(f"tensorflow.python.layers.{name}"): importlib.import_module(
            f"{KERAS}.src.legacy_tf_layers.{name}"
        )
        for name in ("convolutional", "core", "normalization", "pooling")
    }


def load_generated_code_with(loader: type) -> None:
    """Has AutoGraph load what it makes of functions with a kind of `SourceFileLoader` (`pyct.loader`, TF 2.15).

    It makes code of the text of a function, in which imports stand as they do in the user's file.
    """
    from tensorflow.python.autograph.pyct import loader as loader_of_autograph

    def spec_from_file_location(name, path):
        return importlib.util.spec_from_file_location(name, path, loader=loader(name, path))

    util = types.SimpleNamespace(
        spec_from_file_location=spec_from_file_location, module_from_spec=importlib.util.module_from_spec
    )
    loader_of_autograph.importlib = types.SimpleNamespace(util=util)


def keras_of_1() -> types.ModuleType:
    """`tf.keras` as `tf.compat.v1` has it (`keras.api._v1.keras`, Keras 2.15)."""
    return importlib.import_module(f"{KERAS}.api._v1.keras")


def layer_of_cells() -> type:
    """The class of cells that make their variables as layers do (`legacy_cells.LayerRNNCell`, Keras 2.15)."""
    return importlib.import_module(f"{KERAS}.src.layers.rnn.legacy_cells").LayerRNNCell


def engine_classes() -> tuple[type, type, type]:
    """A model of layers, a layer of inputs, and what a layer takes (`keras.src.engine`, Keras 2.15)."""
    functional, layer, spec = (
        importlib.import_module(f"{KERAS}.src.engine.{name}") for name in ("functional", "input_layer", "input_spec")
    )
    return functional.Functional, layer.InputLayer, spec.InputSpec


def background_saver_hook() -> type:
    """Saves while training goes on (`tpu.async_checkpoint.AsyncCheckpointSaverHook`, TF 2.15).

    TensorFlow 2.16 has none any more; the hook that saves between steps takes its place.
    """
    import tensorflow.compat.v1 as tf

    try:
        from tensorflow.python.tpu.async_checkpoint import AsyncCheckpointSaverHook
    except ModuleNotFoundError:
        return tf.train.CheckpointSaverHook
    return AsyncCheckpointSaverHook
