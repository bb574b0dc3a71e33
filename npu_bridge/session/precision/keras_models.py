"""Changes the dtypes of the layers and variables of a Keras model to 16 bits, or back to float32.

Functional and sequential models are rebuilt from their configuration, with other dtypes, and get the weights of the old
model. Subclassed models cannot be rebuilt: the policies of their layers are changed in place, before the variables are
created.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge.base.arguments import check_instance
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.tf_internals.training import is_graph_network, set_dtype_policy
from npu_bridge.session.precision import rewriter
from npu_bridge.session.precision.batch_norm import BatchNormalizationIn16Bits, BatchNormalizationInFloat32

_BATCH_NORMALIZATION = tf.keras.layers.BatchNormalization
_OURS = (BatchNormalizationIn16Bits, BatchNormalizationInFloat32)
# Layers that look their inputs up in a table, so that the inputs must not be rounded.
_LOOKING_UP = ("Embedding", "Hashing", "CategoryEncoding", "IntegerLookup", "StringLookup", "Discretization")


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class _RoundedOrthogonal(tf.keras.initializers.Orthogonal):
    """Keras' `Orthogonal` initializer for bfloat16 variables.

    Computes in float32, as TensorFlow has no QR decomposition for bfloat16.
    """

    def __call__(self, shape, dtype=None, **kwargs):
        return tf.cast(super().__call__(shape, tf.float32, **kwargs), dtype)


class ModelDtypes(NamedTuple):
    """The target dtypes of a model.

    Attributes:
      compute: the compute dtype of layers: "float32", "float16" or "bfloat16".
      variables: the dtype of variables. With more bits than `compute` the variables are master weights, which are cast
        at each use.
      keeps_batchnorm: whether batch normalisation has float32 variables and computes in float32.
      outputs: dtype of the model's floating-point outputs; None leaves them unchanged.
      of_layers: compute dtype of single layers, by the name of the layer or of its class.
    """

    compute: str = "float32"
    variables: str = "float32"
    keeps_batchnorm: bool = True
    outputs: str | None = None
    of_layers: Mapping[str, str] = {}

    def policy_name(self, name: str, class_name: str, is_batchnorm: bool) -> str:
        """Returns the name of the Keras policy for a layer."""
        compute = self.of_layers.get(name, self.of_layers.get(class_name, self.compute))
        if is_batchnorm and self.keeps_batchnorm:
            return "float32"
        return compute if compute == self.variables or compute == "float32" else f"mixed_{compute}"


def change_dtypes(model: Any, dtypes: ModelDtypes, owner: str) -> Any:
    """Changes the dtypes of a model.

    Args:
      model: a functional or sequential Keras model, or a subclassed model that is not built yet.
      dtypes: the new dtypes.
      owner: the caller's name in messages.
    Returns:
      A new model, not compiled, with names and weights of the old model. A subclassed model is changed in place and
      returned.
    Raises:
      TypeError: `model` is not a Keras model.
      ValueError: the model cannot be rebuilt, or is subclassed and already built.
    """
    check_instance(owner, "model", model, tf.keras.Model, "a Keras model", "Pass model=None.")
    if is_graph_network(model) or isinstance(model, tf.keras.Sequential):
        changed = _rebuild(model, dtypes, owner)
    else:
        changed = _change_in_place(model, dtypes, owner)
    _warn_about_other_dtypes(changed, dtypes, owner)
    _keep_layer_norm_unfused(changed, dtypes)
    return changed


def _rebuild(model, dtypes, owner):
    classes = {type(layer).__name__: type(layer) for layer in _list_layers(model)}
    classes.update({ours.__name__: ours for ours in _OURS}, BatchNormalization=_BATCH_NORMALIZATION)
    functions: dict[str, Callable] = {}
    config = copy.deepcopy(model.get_config())
    layers = {layer.name: layer for layer in _list_layers(model)}
    for piece in _serialised_objects(config):
        # Layers are built with the model. A TimeDistributed layer built from this entry would have another shape.
        piece.pop("build_config", None)
        _change_layer_dtype(piece, dtypes, classes, layers, functions)
    try:
        with tf.keras.utils.custom_object_scope({**classes, **functions}):
            changed = _with_output_casts(type(model).from_config(config), dtypes.outputs)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as reason:
        fix = "Cast inside the model to the dtype of its layers, or build the model in this dtype."
        problem = f"the model {model.name!r} cannot be rebuilt with layers in {dtypes.compute}"
        raise ValueError(
            message(owner, problem, "layers that follow their policy", str(reason).partition("\n")[0], fix)
        ) from reason
    if model.built and model.weights:
        changed.set_weights(model.get_weights())
    return changed


def _serialised_objects(config: Any) -> Iterator[dict]:
    """Yields every serialised object in a configuration, including those in wrappers and nested models."""
    if isinstance(config, dict):
        if isinstance(config.get("config"), dict) and "class_name" in config:
            yield config
        config = list(config.values())
    if isinstance(config, (list, tuple)):
        for part in config:
            yield from _serialised_objects(part)


def _change_layer_dtype(serialised_object, dtypes, classes, layers, functions):
    """Changes the dtype of a serialised layer; leaves other objects unchanged."""
    config, name = serialised_object["config"], serialised_object["class_name"].rpartition(">")[2]
    if name in ("Orthogonal", "OrthogonalInitializer") and dtypes.variables == "bfloat16":
        serialised_object.update(class_name=_RoundedOrthogonal.__name__, module=__name__)
        serialised_object["registered_name"] = f"npu_bridge>{_RoundedOrthogonal.__name__}"
    if "dtype" not in config or "name" not in config:
        return
    if name == "InputLayer":
        if tf.as_dtype(config["dtype"]).is_floating and not _feeds_lookup_layer(layers.get(config["name"])):
            config["dtype"] = dtypes.compute
        return
    if name == "Lambda" and config["name"] in layers:
        # The function itself: its serialised form has lost the module it was defined in.
        key = f"function of {config['name']}"
        functions[key] = layers[config["name"]].function
        config.update(function=key, function_type="function")
    is_batchnorm = issubclass(classes.get(name, object), _BATCH_NORMALIZATION)
    config["dtype"] = dtypes.policy_name(config["name"], name, is_batchnorm)
    if is_batchnorm and classes[name] in (*_OURS, _BATCH_NORMALIZATION):
        config.pop("output_dtype", None)
        layer = _layer_of_batchnorm(dtypes)
        if layer is BatchNormalizationInFloat32:
            config["output_dtype"] = dtypes.compute
        is_stock = layer is _BATCH_NORMALIZATION
        module, registered = ("keras.layers", None) if is_stock else (layer.__module__, f"npu_bridge>{layer.__name__}")
        serialised_object.update(class_name=layer.__name__, module=module, registered_name=registered)


def _layer_of_batchnorm(dtypes: ModelDtypes) -> type:
    if dtypes.compute == "float32":
        return _BATCH_NORMALIZATION
    return BatchNormalizationInFloat32 if dtypes.keeps_batchnorm else BatchNormalizationIn16Bits


def _feeds_lookup_layer(layer: Any) -> bool:
    nodes = getattr(layer, "outbound_nodes", ())
    return any(type(node.layer).__name__ in _LOOKING_UP for node in nodes)


def _with_output_casts(model, dtype):
    """Returns a model in which each floating-point output is cast to `dtype`; None changes nothing."""
    if dtype is None:
        return model
    if isinstance(model, tf.keras.Sequential):
        if not model.layers or getattr(model.layers[-1], "dtype_policy", None) != tf.keras.mixed_precision.Policy(
            dtype
        ):
            model.add(tf.keras.layers.Activation("linear", dtype=dtype, name=f"{model.name}_{dtype}"))
        return model
    names = list(model.output_names)
    flat = tf.nest.flatten(model.output)
    if all(not tensor.dtype.is_floating or tensor.dtype == dtype for tensor in flat):
        return model
    casts = [
        tf.keras.layers.Activation("linear", dtype=dtype, name=f"{name}_{dtype}")(tensor)
        if tensor.dtype.is_floating and tensor.dtype != dtype
        else tensor
        for name, tensor in zip(names, flat)
    ]
    outputs = tf.nest.pack_sequence_as(model.output, casts)
    changed = type(model)(inputs=model.input, outputs=outputs, name=model.name)
    changed.output_names = names  # losses and metrics are found by them
    return changed


def _change_in_place(model, dtypes, owner):
    if model.built or model.weights:
        problem = f"the model {model.name!r} is subclassed and has its variables already"
        fix = f"Call {owner} before the model sees its first batch."
        raise ValueError(
            message(owner, problem, "a model that is not built, or a functional model", "a built model", fix)
        )
    for layer in _list_layers(model):
        is_batchnorm = isinstance(layer, _BATCH_NORMALIZATION)
        set_dtype_policy(layer, dtypes.policy_name(layer.name, type(layer).__name__, is_batchnorm))
        if is_batchnorm and type(layer) in (*_OURS, _BATCH_NORMALIZATION):
            layer.__class__ = _layer_of_batchnorm(dtypes)
            layer.output_dtype = dtypes.compute
    if dtypes.outputs is not None:
        model.call = _with_cast_outputs(model.call, dtypes.outputs)
    return model


def _with_cast_outputs(call, dtype):
    @functools.wraps(call)
    def cast_call(*arguments, **keywords):
        outputs = call(*arguments, **keywords)
        return tf.nest.map_structure(
            lambda value: tf.cast(value, dtype) if tf.is_tensor(value) and value.dtype.is_floating else value, outputs
        )

    return cast_call


def _list_layers(model: Any) -> list:
    return [model, *(module for module in model.submodules if isinstance(module, tf.keras.layers.Layer))]


def _warn_about_other_dtypes(model, dtypes, owner):
    """Warns which variables do not have the new dtype, because some layers choose float32 themselves."""
    others = [
        variable.name
        for layer in model.submodules
        if isinstance(layer, tf.keras.layers.Layer) and _should_have_dtype(layer, dtypes)
        for variable in layer.weights
        if variable.dtype.is_floating and variable.dtype != dtypes.variables
    ]
    if others:
        others = sorted(set(others))
        say_once(
            logging.WARNING,
            f"{owner}: some layers choose the dtype of their variables. Expected {dtypes.variables}; got another dtype "
            f"for {', '.join(others[:5])}{' ...' if len(others) > 5 else ''}. These layers train in their own dtype.",
        )


def _should_have_dtype(layer, dtypes):
    is_batchnorm = isinstance(layer, _BATCH_NORMALIZATION)
    is_excepted = dtypes.of_layers.keys() & {layer.name, type(layer).__name__}
    return not (is_excepted or layer.submodules or (is_batchnorm and dtypes.keeps_batchnorm))


def _keep_layer_norm_unfused(model, dtypes):
    """Turns off a pass of TensorFlow 2.15 that replaces float16 layer normalisation by a kernel that CPUs lack."""
    names = {type(layer).__name__ for layer in model.submodules}
    if dtypes.compute == "float16" and "LayerNormalization" in names and rewriter.main_device_kind() == "CPU":
        tf.config.optimizer.set_experimental_options({"remapping": False})
