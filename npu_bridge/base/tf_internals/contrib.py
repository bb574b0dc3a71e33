"""Wraps private names that TensorFlow 2.15.1 and Keras 2.15.0 keep from 1.15, for `tensorflow1_compat/`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

from npu_bridge.base.after_import import wrap_function
from npu_bridge.base.tf_internals.names import KERAS

if TYPE_CHECKING:
    import tensorflow as tf

_LEAST_EPSILON = 1.001e-5  # required by old versions of cuDNN


def constant_shape(tensor: tf.Tensor) -> tf.TensorShape:
    """Returns a shape tensor's static value (`tensor_util.constant_value_as_shape`, TF 2.15)."""
    from tensorflow.python.framework import tensor_util

    return tensor_util.constant_value_as_shape(tensor)


def accept_whole_floats() -> None:
    """Allows whole floats as sizes, `[3, 64 / 2]`, as in TensorFlow 1.15 (`tensor_shape.Dimension`, TF 2.15)."""
    from tensorflow.python.framework import tensor_shape

    def init_with_whole_floats(init: Callable, dimension: Any, value: Any) -> None:
        init(dimension, int(value) if isinstance(value, float) and value.is_integer() else value)

    if not hasattr(tensor_shape.Dimension.__init__, "__wrapped__"):
        wrap_function(tensor_shape.Dimension, "__init__", init_with_whole_floats)


def raise_batch_norm_epsilons() -> None:
    """Makes fused batch normalisations add at least 1.001e-5 to a variance, as in TensorFlow 1.15.

    Only `nn_impl.fused_batch_norm` (TF 2.15), which Keras and TF-Slim call, uses the changed operator.
    """
    from tensorflow.python.ops import gen_nn_ops, nn_impl

    if nn_impl.gen_nn_ops is not gen_nn_ops:
        return
    stock = gen_nn_ops.fused_batch_norm_v3

    @functools.wraps(stock)
    def fused_with_larger_epsilon(*arguments: Any, epsilon: float, **options: Any) -> Any:
        return stock(*arguments, epsilon=max(epsilon, _LEAST_EPSILON), **options)

    nn_impl.gen_nn_ops = types.ModuleType(gen_nn_ops.__name__, gen_nn_ops.__doc__)
    nn_impl.gen_nn_ops.__dict__.update(vars(gen_nn_ops), fused_batch_norm_v3=fused_with_larger_epsilon)


def take_logits_of_same_activation(backend: types.ModuleType) -> None:
    """Makes cross-entropies of Keras take logits from their own activation only (`backend._get_logits`, Keras 2.15).

    Keras 2.15 also takes logits of a softmax for those of a sigmoid, and vice versa. TensorFlow 1.15 does not.
    """

    def get_logits(output: Any, from_logits: bool, op_type: str, fn_name: str) -> tuple[Any, bool]:
        operator = getattr(output, "op", None)  # eager tensors have none
        if from_logits or operator is None or operator.type != op_type:
            return output, from_logits
        return operator.inputs[0], True

    backend._get_logits = get_logits


def run_in_both_modes(method: Callable, **options: Any) -> Callable:
    """Makes a test method run in graph mode and in eager mode (`test_util.run_in_graph_and_eager_modes`, TF 2.15)."""
    from tensorflow.python.framework import test_util

    return test_util.run_in_graph_and_eager_modes(method, **options)


def moving_average_step(variable: Any, value: Any, decay: float, name: str) -> tf.Tensor:
    """Updates a moving average without zero debiasing (`moving_averages.assign_moving_average`, TF 2.15)."""
    from tensorflow.python.training import moving_averages

    return moving_averages.assign_moving_average(variable, value, decay, name=name)


def column_with_ids(column: tuple, ids_of: Callable) -> tuple:
    """Returns a categorical column like another one, with the ids that `ids_of` makes of a sparse tensor of features.

    The method is `IdentityCategoricalColumn._transform_input_tensor`, or that of another class, TF 2.15.
    """
    made = _class_with_own_ids(type(column))(*column)
    made.ids_of = ids_of
    return made


@functools.lru_cache
def _class_with_own_ids(kind: type) -> type:
    # Columns that share an embedding must have the same class.
    return type(kind.__name__, (kind,), {"_transform_input_tensor": lambda self, features: self.ids_of(features)})


def has_own_update(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Returns whether an optimizer updates variables itself, unlike a wrapper (`Optimizer._resource_apply_dense`)."""
    import tensorflow as tf

    return type(optimizer)._resource_apply_dense is not tf.compat.v1.train.Optimizer._resource_apply_dense


def remove_squeezable_dimensions(labels: Any, predictions: Any, name: str | None) -> tuple:
    """Returns labels and predictions of equal rank (`confusion_matrix.remove_squeezable_dimensions`, TF 2.15)."""
    from tensorflow.python.ops import confusion_matrix

    return confusion_matrix.remove_squeezable_dimensions(labels, predictions, name=name)


def flatten_up_to(shallow_structure: Any, deep_structure: Any) -> list:
    """Flattens `deep_structure` to the leaves of `shallow_structure` (`util.nest.flatten_up_to`, TF 2.15)."""
    from tensorflow.python.util import nest

    return nest.flatten_up_to(shallow_structure, deep_structure)


def flatten_element(element: Any) -> list:
    """Flattens a dataset's element, in which a list counts as a tensor (`data.util.nest.flatten`, TF 2.15)."""
    from tensorflow.python.data.util import nest

    return nest.flatten(element)


def pack_element(element: Any, tensors: Sequence) -> Any:
    """Packs tensors into the structure of a dataset's element (`data.util.nest.pack_sequence_as`, TF 2.15)."""
    from tensorflow.python.data.util import nest

    return nest.pack_sequence_as(element, list(tensors))


def lookup_ops() -> types.ModuleType:
    """Returns the module of table functions (`ops.lookup_ops.index_table_from_file` and others, TF 2.15)."""
    from tensorflow.python.ops import lookup_ops as module

    return module


def write_profile(profiler: Any, path: str) -> None:
    """Writes the profile of a `tf.profiler.Profiler` (`Profiler._write_profile`, TF 2.15)."""
    profiler._write_profile(path)


def keras_loss_scale_optimizer() -> type:
    """Returns the loss scaler of legacy Keras optimizers (`loss_scale_optimizer.LossScaleOptimizer`, Keras 2.15)."""
    return importlib.import_module(f"{KERAS}.src.mixed_precision.loss_scale_optimizer").LossScaleOptimizer


def missing_names_by_module() -> dict[types.ModuleType, tuple[str, ...]]:
    """Returns modules that TF-Slim 1.1 imports, with the names they lack now (`framework.ops` and others, TF 2.15)."""
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import array_ops, control_flow_ops

    return {
        array_ops: ("stack", "unstack"),
        control_flow_ops: ("Assert", "case", "cond", "while_loop"),
        ops: ("IndexedSlices", "SparseTensor", "Tensor", "register_tensor_conversion_function"),
    }


def variable_scope_module() -> types.ModuleType:
    """Returns the module of variable scopes, which TF-Slim 1.1 imports (`ops.variable_scope`, TF 2.15)."""
    from tensorflow.python.ops import variable_scope

    return variable_scope


def replacements_of_layer_modules() -> dict[types.ModuleType, types.ModuleType]:
    """Maps TensorFlow's modules of TF 1 layers to the modules of Keras that replace them.

    Checked in TF 2.15: the modules in `tensorflow.python.layers` need a package that might not be installed.
    """
    return {
        importlib.import_module(f"tensorflow.python.layers.{name}"): importlib.import_module(
            f"{KERAS}.src.legacy_tf_layers.{name}"
        )
        for name in ("convolutional", "core", "normalization", "pooling")
    }


def load_generated_code_with(loader: type) -> None:
    """Makes AutoGraph load generated code with a subclass of `SourceFileLoader` (`pyct.loader`, TF 2.15).

    AutoGraph copies imports of the user's file into the generated code.
    """
    from tensorflow.python.autograph.pyct import loader as loader_of_autograph

    def spec_from_file_location(name, path):
        return importlib.util.spec_from_file_location(name, path, loader=loader(name, path))

    util = types.SimpleNamespace(
        spec_from_file_location=spec_from_file_location, module_from_spec=importlib.util.module_from_spec
    )
    loader_of_autograph.importlib = types.SimpleNamespace(util=util)


def keras_of_tf1() -> types.ModuleType:
    """Returns `tf.keras` of `tf.compat.v1` (`keras.api._v1.keras`, Keras 2.15)."""
    return importlib.import_module(f"{KERAS}.api._v1.keras")


def rnn_cell_base() -> type:
    """Returns the base class of cells that make variables like layers (`legacy_cells.LayerRNNCell`, Keras 2.15)."""
    return importlib.import_module(f"{KERAS}.src.layers.rnn.legacy_cells").LayerRNNCell


def keras_engine_classes() -> tuple[type, type, type]:
    """Returns the classes of a functional model, an input layer, and an input spec (`keras.src.engine`, Keras 2.15)."""
    functional, layer, spec = (
        importlib.import_module(f"{KERAS}.src.engine.{name}") for name in ("functional", "input_layer", "input_spec")
    )
    return functional.Functional, layer.InputLayer, spec.InputSpec


def background_saver_hook() -> type:
    """Returns the hook that saves in the background (`tpu.async_checkpoint.AsyncCheckpointSaverHook`, TF 2.15).

    From TensorFlow 2.16 on, which lacks that hook, returns the hook that saves between steps.
    """
    import tensorflow.compat.v1 as tf

    try:
        from tensorflow.python.tpu.async_checkpoint import AsyncCheckpointSaverHook
    except ModuleNotFoundError:
        return tf.train.CheckpointSaverHook
    return AsyncCheckpointSaverHook
