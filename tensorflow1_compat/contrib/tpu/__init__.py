"""`tf.contrib.tpu`: estimators and optimizers for TPUs, which here train on the existing devices."""

import logging

import tensorflow.compat.v1 as tf
from tensorflow.compat.v1.estimator.tpu import InputPipelineConfig, RunConfig, TPUConfig, TPUEstimatorSpec
from tensorflow.compat.v1.tpu import CrossShardOptimizer as _CrossShardOptimizer
from tensorflow.compat.v1.tpu import PaddingSpec, XLAOptions, bfloat16_scope
from tensorflow.python.tpu.device_assignment import DeviceAssignment, device_assignment
from tensorflow.python.tpu.topology import Topology
from tensorflow.python.tpu.tpu_function import get_tpu_context

from npu_bridge.base.errors import say_once
from npu_bridge.base.tf_internals.contrib import background_saver_hook
from tensorflow1_compat.contrib.tpu.ops import (
    batch_parallel,
    core,
    cross_replica_sum,
    initialize_system,
    outside_compilation,
    replicate,
    rewrite,
    shard,
    shutdown_system,
)

AsyncCheckpointSaverHook = background_saver_hook()


class TPUEstimator(tf.estimator.tpu.TPUEstimator):
    """A `tf.estimator.tpu.TPUEstimator` that uses the existing devices even with `use_tpu=True`.

    `input_fn(params)` and `model_fn(..., params)` get the batch size of the mode in `params["batch_size"]`. The
    `eval_metrics` and host calls of a `TPUEstimatorSpec` are computed as with `use_tpu=False`.

    Args: as in TensorFlow 1.15. `config` can be any `tf.estimator.RunConfig`.
    """

    def __init__(
        self, model_fn=None, model_dir=None, config=None, params=None, use_tpu=True, train_batch_size=None,
        eval_batch_size=None, predict_batch_size=None, batch_axis=None, eval_on_tpu=True, export_to_tpu=True,
        export_to_cpu=True, warm_start_from=None, **others,
    ):  # fmt: skip
        if use_tpu:
            say_once(logging.INFO, "TPUEstimator: use_tpu=True has no effect here; the training runs without a TPU.")
        if config is not None and not isinstance(config, RunConfig):
            config = _with_tpu_config(config)
        super().__init__(
            model_fn=model_fn, model_dir=model_dir, config=config, params=params, use_tpu=False,
            train_batch_size=train_batch_size, eval_batch_size=eval_batch_size, predict_batch_size=predict_batch_size,
            batch_axis=batch_axis, eval_on_tpu=False, export_to_tpu=False, export_to_cpu=export_to_cpu,
            warm_start_from=warm_start_from, **others,
        )  # fmt: skip


def _with_tpu_config(config):
    """Converts a `tf.estimator.RunConfig` to a RunConfig of this module with the same settings."""
    fields = (
        "model_dir", "tf_random_seed", "save_summary_steps", "save_checkpoints_steps", "save_checkpoints_secs",
        "session_config", "keep_checkpoint_max", "keep_checkpoint_every_n_hours", "log_step_count_steps",
    )  # fmt: skip
    return RunConfig(**{name: getattr(config, name) for name in fields if getattr(config, name) is not None})


class CrossShardOptimizer(_CrossShardOptimizer):
    """An optimizer that calls the inner optimizer unchanged, because this package trains one shard in each process.

    The ranks of a job are not shards: the script's NPU optimizer averages gradients over ranks.
    """

    def compute_gradients(self, loss, var_list=None, **kwargs):
        return self._opt.compute_gradients(loss, var_list=var_list, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return self._opt.apply_gradients(grads_and_vars, global_step, name)
