"""Wraps the user's `model_fn` for an `NPUEstimator`; defines `NPUEstimatorSpec`, which a `model_fn` can return."""

from __future__ import annotations

import inspect

import tensorflow as tf

from npu_bridge import collective, session
from npu_bridge.base.errors import message
from npu_bridge.estimator.npu.checks import warn_uncounted_steps
from npu_bridge.estimator.npu.npu_hook import NPUInfeedOutfeedSessionHook
from npu_bridge.gradients.collections import UNSCALED_LOSS, publish_in_graph
from npu_bridge.gradients.keras.in_graphs import check_train_op, explain_keras_refusal
from npu_bridge.graph.operators import computed_ops
from npu_bridge.graph.variables import changed_variables
from npu_bridge.options import of_graph

_EXAMPLES = {"loss": "loss", "train_op": "optimizer.minimize(loss, tf.train.get_global_step())"}
_MODEL_FN_ARGUMENTS = ("features", "labels", "mode", "params", "config")


class NPUEstimatorSpec(tf.estimator.EstimatorSpec):
    """The result of a `model_fn`: an `EstimatorSpec` with an optional `host_call`.

    Args:
      mode, predictions, loss, train_op, eval_metric_ops, export_outputs, training_chief_hooks, training_hooks,
        scaffold, evaluation_hooks, prediction_hooks: as in `tf.estimator.EstimatorSpec`.
      host_call: pair of a function and the function's arguments: a list, tuple or dict of tensors. An `NPUEstimator`
        calls the function once, when it builds the graph for training or evaluation. The operators that the function
        returns, and its `tf.summary` operators, run with every step on rank 0, after the training step (in
        evaluation, after the loss). Writers of `tf.summary` are opened before the first step and flushed after the
        last.
    Raises:
      ValueError: `host_call` is not a pair; or `loss`, or in training `train_op`, is missing.
      TypeError: the first element of `host_call` cannot be called.
      RuntimeError: the numbers of tensors and of the function's arguments differ.
    """

    def __new__(
        cls,
        mode,
        predictions=None,
        loss=None,
        train_op=None,
        eval_metric_ops=None,
        export_outputs=None,
        training_chief_hooks=None,
        training_hooks=None,
        scaffold=None,
        evaluation_hooks=None,
        prediction_hooks=None,
        host_call=None,
    ):
        if host_call is not None:
            session.check_host_call(host_call)
        for name, value, modes in (("loss", loss, ("train", "eval")), ("train_op", train_op, ("train",))):
            if value is None and mode in modes:
                fix = f"Pass {name}={_EXAMPLES[name]}."
                raise ValueError(message(cls.__name__, f"{name} is missing", f"a value in mode {mode!r}", "None", fix))
        spec = super().__new__(
            cls,
            mode=mode,
            predictions=predictions,
            loss=loss,
            train_op=train_op,
            eval_metric_ops=eval_metric_ops,
            export_outputs=export_outputs,
            training_chief_hooks=training_chief_hooks,
            training_hooks=training_hooks,
            scaffold=scaffold,
            evaluation_hooks=evaluation_hooks,
            prediction_hooks=prediction_hooks,
        )
        spec._host_call = host_call
        return spec

    def _replace(self, **changes):
        """Returns a spec with other values, as for any EstimatorSpec; it keeps its `host_call`."""
        return NPUEstimatorSpec(*super()._replace(**changes), host_call=self._host_call)


def wrap_model_fn(model_fn, options, has_params):
    """Returns a model function that applies `options` and calls `model_fn` with the arguments that `model_fn` has."""
    parameters = dict(inspect.signature(model_fn).parameters)
    for bound in getattr(model_fn, "keywords", ()):  # of a functools.partial
        parameters.pop(bound, None)
    unknown = [name for name in parameters if name not in _MODEL_FN_ARGUMENTS]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    ignores_params = has_params and "params" not in parameters and not takes_any
    if "features" not in parameters or (unknown and not takes_any) or ignores_params:
        raise ValueError(
            f"NPUEstimator: model_fn has the wrong arguments. Expected features and optionally "
            f"{', '.join(_MODEL_FN_ARGUMENTS[1:])}{' (params is required)' if ignores_params else ''}; got "
            f"{', '.join(parameters) or 'no arguments'}. Rename its arguments"
            f"{', or add params' if ignores_params else ''}."
        )

    def build(features, labels, mode, params, config):
        of_graph.record_options(options)
        session.prepare_graph(options, tf.compat.v1.get_default_graph(), belongs_to_this_run=True)
        given = {"features": features, "labels": labels, "mode": mode, "params": params, "config": config}
        given = {name: value for name, value in given.items() if takes_any or name in parameters}
        is_training = mode == tf.estimator.ModeKeys.TRAIN
        with explain_keras_refusal("NPUEstimator"):
            spec = model_fn(**given)
        if not isinstance(spec, tf.estimator.EstimatorSpec):
            raise (RuntimeError if mode != tf.estimator.ModeKeys.PREDICT else ValueError)(
                f"NPUEstimator: model_fn returned no EstimatorSpec. Expected an EstimatorSpec or NPUEstimatorSpec; got "
                f"{spec!r}. Return an EstimatorSpec in mode {mode!r}."
            )
        if is_training:
            check_train_op(spec.train_op, "NPUEstimator")
            # Scripts that scale their loss by hand pass the scaled loss to the optimizer, which has recorded that.
            publish_in_graph(UNSCALED_LOSS, spec.loss)
            global_step = tf.compat.v1.train.get_global_step()
            ops = computed_ops([getattr(spec.train_op, "op", spec.train_op)])
            if global_step is not None and global_step.op.name not in changed_variables(ops):
                warn_uncounted_steps()
        if isinstance(spec, NPUEstimatorSpec) and spec._host_call is not None:
            spec = _add_host_call(spec)
        if is_training and options.iterations_per_loop > 1:
            spec = spec._replace(train_op=session.name_step(spec.train_op))
        return spec

    def npu_model_fn(features, labels, mode, params, config):  # TensorFlow passes arguments by these names
        return build(features, labels, mode, params, config)

    return npu_model_fn


def _add_host_call(spec):
    if spec.mode == tf.estimator.ModeKeys.PREDICT or collective.current().rank > 0:
        return spec
    is_training = spec.mode == tf.estimator.ModeKeys.TRAIN
    host_op = session.call_on_host(*spec._host_call, control_input=spec.train_op if is_training else spec.loss)
    # The operators are part of the step, so that a loop runs them every time; the hook fetches nothing.
    hook = NPUInfeedOutfeedSessionHook([], "host_call")
    if is_training:
        return spec._replace(
            train_op=tf.group(spec.train_op, host_op), training_hooks=[hook, *(spec.training_hooks or ())]
        )
    with tf.control_dependencies([host_op]):
        loss = tf.identity(spec.loss)
    return spec._replace(loss=loss, evaluation_hooks=[hook, *(spec.evaluation_hooks or ())])
