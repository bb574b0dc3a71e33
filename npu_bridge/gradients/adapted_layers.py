"""Gives every rank the Keras layers, such as `Normalization` and `StringLookup`, that one rank adapted to data.

Adapted layers compute with constants derived from their variables. Some also keep tables of words, or boundaries, which
are not variables. So broadcasting the start values of variables is not enough.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from npu_bridge import collective
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import keras3
from npu_bridge.collective.exchanges import gather_values

_OWNER = "Start of a training"
_MEETING = "adapted_layers"


def renew_adapted_layers(model: Any, root_rank: int = 0) -> None:
    """Copies the adapted layers of one rank to all ranks, and derives their constants anew.

    Functions that `fit`, `evaluate` and `predict` have compiled hold the old constants; the next call compiles again.

    Args:
      model: a model whose variables have their start values.
      root_rank: the rank whose tables are taken.
    Raises:
      ValueError: another rank has other such layers, or a layer cannot change any more.
    Ranks: collective.
    """
    parts = tf.train.TrackableView(model).descendants()
    layers = [part for part in parts if callable(getattr(part, "adapt", None)) and hasattr(part, "finalize_state")]
    for layer in layers:
        # Without variables nothing has changed, and Keras 3.15 would need data that only `adapt` leaves behind.
        if any(isinstance(keras3.tensorflow_variable_of(weight), tf.Variable) for weight in layer.weights):
            layer.finalize_state()
    own, is_root = [_kept_besides(layer) for layer in layers], collective.current().rank == root_rank
    kinds = [type(layer).__name__ for layer in layers]
    of_ranks = gather_values([kinds, hashlib.blake2b(str(own).encode()).hexdigest()], _MEETING)
    for rank, (others, _) in enumerate(of_ranks):
        if others != of_ranks[root_rank][0]:
            problem, expected = f"rank {rank} has other layers that can be adapted", f"{of_ranks[root_rank][0]}"
            raise ValueError(message(_OWNER, problem, expected, f"{others}", "Build the same model on every rank."))
    if len({digest for _, digest in of_ranks}) > 1:
        sent = gather_values(own if is_root else None, _MEETING)[root_rank]
        for layer, kept in zip(layers, sent) if not is_root else ():
            _take(layer, kept)
    if layers and hasattr(model, "make_train_function"):
        model.test_function = model.predict_function = None
        model.make_train_function(force=True)


def _kept_besides(layer):
    """Returns the vocabulary, weights and boundaries that a layer keeps outside of variables."""
    kept: dict = {}
    if hasattr(layer, "lookup_table"):
        kept["vocabulary"] = np.asarray(layer.get_vocabulary()).tolist()
        if hasattr(layer, "idf_weights"):
            kept["idf_weights"] = np.asarray(layer.idf_weights)[: len(kept["vocabulary"])].tolist()
    if hasattr(layer, "bin_boundaries"):
        kept["bin_boundaries"] = layer.bin_boundaries and [float(each) for each in layer.bin_boundaries]
    return kept


def _take(layer, kept):
    if kept.get("bin_boundaries"):
        layer.bin_boundaries = kept["bin_boundaries"]
    if kept.get("vocabulary"):
        try:
            layer.set_vocabulary(kept["vocabulary"], kept.get("idf_weights"))
        except RuntimeError as error:
            problem, expected = f"{layer.name} lacks the words of the rank that was adapted", "as many words"
            fix = "Call adapt before the layer, on every rank, or set pad_to_max_tokens=True."
            raise ValueError(message(_OWNER, problem, expected, str(error), fix)) from error
