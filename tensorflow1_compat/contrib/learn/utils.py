"""Exports saved models: `tf.contrib.learn.utils.saved_model_export_utils`."""

from __future__ import annotations

import sys

import tensorflow.compat.v1 as tf


def make_export_strategy(
    serving_input_fn, default_output_alternative_key=None, assets_extra=None, as_text=False, exports_to_keep=5,
    strip_default_attrs=None,
):  # fmt: skip
    """Returns an exporter of the latest model, for `Experiment(export_strategies=...)` and `tf.estimator.EvalSpec`."""

    def make_receiver():
        given = serving_input_fn()
        if hasattr(given, "receiver_tensors"):
            return given
        return tf.estimator.export.ServingInputReceiver(given.features, given.default_inputs)

    return tf.estimator.LatestExporter(
        "Servo", make_receiver, assets_extra=assets_extra, as_text=as_text, exports_to_keep=exports_to_keep
    )


saved_model_export_utils = sys.modules[__name__]
