"""`tf.contrib.predictor`: callable objects that compute predictions of a saved model."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


class _Predictor:
    """A predictor with an open session: a call takes a dict of arrays and returns a dict of arrays.

    Attributes:
      session, graph: session and graph of the model.
      feed_tensors, fetch_tensors: input name -> tensor, and output name -> tensor.
    """

    def __init__(self, session, feed_tensors, fetch_tensors):
        self.session, self.graph = session, session.graph
        self.feed_tensors, self.fetch_tensors = feed_tensors, fetch_tensors

    def __call__(self, input_dict):
        unknown = set(input_dict) - set(self.feed_tensors)
        if unknown:
            raise ValueError(
                f"predictor: unknown inputs {sorted(unknown)}. Expected some of {sorted(self.feed_tensors)}."
            )
        feeds = {self.feed_tensors[name]: value for name, value in input_dict.items()}
        return self.session.run(self.fetch_tensors, feeds)


def _make_predictor(session, inputs, outputs):
    """Returns a predictor for input and output tensors given by name."""
    find = session.graph.get_tensor_by_name
    return _Predictor(
        session, {key: find(name) for key, name in inputs.items()}, {key: find(name) for key, name in outputs.items()}
    )


def from_saved_model(
    export_dir, signature_def_key=None, signature_def=None, input_names=None, output_names=None, tags=None, graph=None,
    config=None,
):  # fmt: skip
    """Returns a predictor of a saved model.

    Args:
      export_dir: the model's folder.
      signature_def_key: name of the signature; default: "serving_default".
      signature_def: a signature that replaces `signature_def_key`.
      input_names, output_names: dicts of tensor names that replace the signature.
      tags: tags of the MetaGraphDef, separated by commas; default: "serve".
      graph, config: graph and ConfigProto of the session.
    """
    session = tf.Session(graph=graph or tf.Graph(), config=config)
    with session.graph.as_default():
        tags = tags.split(",") if isinstance(tags, str) else list(tags or ["serve"])
        model = tf.saved_model.loader.load(session, tags, export_dir)
    if input_names is not None or output_names is not None:
        return _make_predictor(session, input_names, output_names)
    key = signature_def_key or "serving_default"
    if signature_def is None and key not in model.signature_def:
        raise ValueError(f"from_saved_model: no signature {key!r}. Expected one of {sorted(model.signature_def)}.")
    signature = signature_def or model.signature_def[key]
    inputs = {name: info.name for name, info in signature.inputs.items()}
    outputs = {name: info.name for name, info in signature.outputs.items()}
    return _make_predictor(session, inputs, outputs)


def from_estimator(estimator, serving_input_receiver_fn, output_key=None, graph=None, config=None):
    """Returns a predictor of an estimator's last checkpoint."""
    graph = graph or tf.Graph()
    with graph.as_default():
        receiver = serving_input_receiver_fn()
        spec = estimator.model_fn(receiver.features, None, tf.estimator.ModeKeys.PREDICT, estimator.config)
        session = tf.Session(graph=graph, config=config)
        (spec.scaffold.saver if spec.scaffold and spec.scaffold.saver else tf.train.Saver()).restore(
            session, tf.train.latest_checkpoint(estimator.model_dir)
        )
        session.run(tf.tables_initializer())
    outputs = spec.predictions
    if spec.export_outputs:
        chosen = spec.export_outputs[output_key or tf.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY]
        outputs = getattr(chosen, "outputs", None) or spec.predictions
    outputs = outputs if isinstance(outputs, dict) else {"output": outputs}
    return _Predictor(session, receiver.receiver_tensors, outputs)
