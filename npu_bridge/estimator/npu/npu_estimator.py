"""`NPUEstimator` and `NPUEstimatorSpec`."""

from __future__ import annotations

import inspect
import logging
import os
import random
import string

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_hook import NPUBroadcastGlobalVariablesHook

__all__ = ["NPUEstimator", "NPUEstimatorSpec"]

_LOG = logging.getLogger(__name__)


class NPUEstimatorSpec(tf.estimator.EstimatorSpec):
    """What a `model_fn` returns: an `EstimatorSpec` with an optional `host_call`.

    Args:
      mode, predictions, loss, train_op, eval_metric_ops, export_outputs, training_chief_hooks, training_hooks,
        scaffold, evaluation_hooks, prediction_hooks: as in `tf.estimator.EstimatorSpec`.
      host_call: pair of a function and the list, tuple or dict of tensors it is called with. Kept, not run yet.
    Raises:
      ValueError: `host_call` is not such a pair.
      TypeError: its first element cannot be called.
      RuntimeError: the function takes another number of arguments than there are tensors.
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
            _check_host_call(host_call)
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


class NPUEstimator(tf.estimator.Estimator):
    """An `Estimator` that takes an `NPURunConfig` and gives every rank the same start.

    With several ranks each training begins by sending rank 0's variables to the others (unless
    `NPURunConfig(horovod_mode=True)` leaves that to the script), and how far training has come is decided by rank 0's
    checkpoint, so that all ranks stop together.

    Args:
      model_fn: function of `features` and, as it likes, `labels`, `mode`, `params`, `config`.
      model_dir: folder of checkpoints and summaries. By default that of `config`; if that has none either, a new
        folder `model_dir_` and ten random characters in the working directory.
      config: an `NPURunConfig`.
      params: dict handed to `model_fn`.
      job_start_file: accepted for compatibility; ranks are known from the launcher.
      warm_start_from: as in `tf.estimator.Estimator`.
    Raises:
      ValueError: `config` is not an `NPURunConfig`, `model_fn` is None, or the two model folders differ.
    """

    def __init__(
        self, model_fn=None, model_dir=None, config=None, params=None, job_start_file="", warm_start_from=None
    ):
        if not isinstance(config, NPURunConfig):
            raise ValueError(
                f"NPUEstimator: config is not an NPURunConfig. Expected an NPURunConfig; got {config!r}. Pass "
                f"config=NPURunConfig(...)."
            )
        if model_fn is None:
            raise ValueError(
                "NPUEstimator: model_fn is missing. Expected a function that returns an EstimatorSpec; got None. "
                "Pass model_fn."
            )
        super().__init__(
            model_fn=model_fn,
            model_dir=_model_dir(model_dir, config),
            config=config,
            params=params or {},
            warm_start_from=warm_start_from,
        )

    def _call_model_fn(self, features, labels, mode, config):
        spec = super()._call_model_fn(features, labels, mode, config)
        needs_broadcast = mode == tf.estimator.ModeKeys.TRAIN and not config.horovod_mode
        if not needs_broadcast or collective.current().size == 1:
            return spec
        hook = NPUBroadcastGlobalVariablesHook(root_rank=0, index=collective.current().rank)
        return spec._replace(training_hooks=[hook, *(spec.training_hooks or ())])


def _model_dir(model_dir, config):
    if model_dir is not None and config.model_dir is not None and model_dir != config.model_dir:
        raise ValueError(
            f"NPUEstimator: two model folders are given. Expected model_dir to equal that of the NPURunConfig; got "
            f"{model_dir!r} and {config.model_dir!r}. Give it in one place."
        )
    if model_dir is not None or config.model_dir is not None:
        return model_dir if model_dir is not None else config.model_dir
    characters = random.SystemRandom().sample(string.ascii_letters + string.digits, 10)
    created = os.path.join(os.getcwd(), "model_dir_" + "".join(characters))
    os.makedirs(created)
    advice = " Ranks do not share it; set model_dir." if collective.current().size > 1 else ""
    _LOG.warning("NPUEstimator: no model_dir is set; checkpoints go to the new folder %s.%s", created, advice)
    return created


def _check_host_call(host_call):
    if not isinstance(host_call, (tuple, list)) or len(host_call) != 2:
        raise ValueError(
            f"NPUEstimatorSpec: host_call is not a pair. Expected (function, tensors); got {host_call!r}. Pass a tuple "
            f"of two."
        )
    function, tensors = host_call
    if not callable(function):
        raise TypeError(
            f"NPUEstimatorSpec: the first element of host_call cannot be called. Expected a function; got "
            f"{function!r}. Pass (function, tensors)."
        )
    if not isinstance(tensors, (tuple, list, dict)):
        raise ValueError(
            f"NPUEstimatorSpec: the second element of host_call holds no arguments. Expected a list, tuple or dict of "
            f"tensors; got {tensors!r}. Pass [tensor] for a single one."
        )
    specification = inspect.getfullargspec(function)
    if not isinstance(tensors, dict) and specification.varargs is None and len(specification.args) != len(tensors):
        raise RuntimeError(
            f"NPUEstimatorSpec: host_call does not fit its function. Expected {len(specification.args)} tensors, one "
            f"for each of {specification.args}; got {len(tensors)}. Pass as many tensors as the function takes."
        )
