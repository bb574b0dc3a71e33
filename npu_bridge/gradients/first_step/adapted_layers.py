"""Gives every rank the Keras layers, such as `Normalization` and `StringLookup`, that one rank adapted to data.

Broadcasting the start values of variables is not enough for adapted layers. They compute with constants derived from
their variables, and some layers also hold vocabularies or bin boundaries that are not variables.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from npu_bridge import collective
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.train_functions import renew_train_function
from npu_bridge.collective.small_values import gather_values

_OWNER = "Start of a training"
_COLLECTIVE_NAME = "adapted_layers"


def renew_adapted_layers(model: Any, root_rank: int = 0) -> None:
    """Copies the adapted layers of `root_rank` to all ranks, and computes their constants again.

    Functions compiled for `fit`, `evaluate` and `predict` hold the old constants, so the next call compiles them again.

    Args:
      model: a model whose variables have their start values.
      root_rank: the rank whose vocabularies and boundaries are copied.
    Raises:
      ValueError: the ranks have different adapted layers, or a layer can no longer change its vocabulary.
    Ranks: collective.
    """
    parts = tf.train.TrackableView(model).descendants()
    layers = [part for part in parts if callable(getattr(part, "adapt", None)) and hasattr(part, "finalize_state")]
    for layer in layers:
        # A layer without variables has not changed, and Keras 3.15 would need data that only `adapt` stores.
        if any(isinstance(keras3.tensorflow_variable_of(weight), tf.Variable) for weight in layer.weights):
            layer.finalize_state()
    own, is_root = [_state_outside_variables(layer) for layer in layers], collective.current().rank == root_rank
    kinds = [type(layer).__name__ for layer in layers]
    of_ranks = gather_values([kinds, hashlib.blake2b(str(own).encode()).hexdigest()], _COLLECTIVE_NAME)
    for rank, (others, _) in enumerate(of_ranks):
        if others != of_ranks[root_rank][0]:
            problem, expected = f"rank {rank} has different adapted layers", f"{of_ranks[root_rank][0]}"
            raise ValueError(message(_OWNER, problem, expected, f"{others}", "Build the same model on every rank."))
    if len({digest for _, digest in of_ranks}) > 1:
        sent = gather_values(own if is_root else None, _COLLECTIVE_NAME)[root_rank]
        for layer, kept in zip(layers, sent) if not is_root else ():
            _set_state_outside_variables(layer, kept)
    if layers and hasattr(model, "make_train_function"):
        model.test_function = model.predict_function = None
        renew_train_function(model)


def _state_outside_variables(layer):
    """Returns the vocabulary, IDF weights and bin boundaries that a layer holds outside of variables."""
    kept: dict = {}
    if hasattr(layer, "lookup_table"):
        kept["vocabulary"] = np.asarray(layer.get_vocabulary()).tolist()
        if hasattr(layer, "idf_weights"):
            kept["idf_weights"] = np.asarray(layer.idf_weights)[: len(kept["vocabulary"])].tolist()
    if hasattr(layer, "bin_boundaries"):
        kept["bin_boundaries"] = layer.bin_boundaries and [float(each) for each in layer.bin_boundaries]
    return kept


def _set_state_outside_variables(layer, state):
    if state.get("bin_boundaries"):
        layer.bin_boundaries = state["bin_boundaries"]
    if state.get("vocabulary"):
        try:
            layer.set_vocabulary(state["vocabulary"], state.get("idf_weights"))
        except RuntimeError as error:
            problem, expected = f"{layer.name} cannot take the words of the adapted rank", "room for all words"
            fix = "Call adapt before the layer, on every rank, or set pad_to_max_tokens=True."
            raise ValueError(message(_OWNER, problem, expected, str(error), fix)) from error
