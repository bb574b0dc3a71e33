"""`tf.contrib.tpu`: estimators and optimizers written for TPUs train on the existing devices."""

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
    """`tf.estimator.tpu.TPUEstimator` on the existing devices, whatever `use_tpu` says.

    `input_fn(params)` and `model_fn(..., params)` find the mode's batch size in `params["batch_size"]`; `eval_metrics`
    and host calls of a `TPUEstimatorSpec` are computed as on a CPU.

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
    """Returns a RunConfig of this module with the settings of another RunConfig."""
    fields = (
        "model_dir", "tf_random_seed", "save_summary_steps", "save_checkpoints_steps", "save_checkpoints_secs",
        "session_config", "keep_checkpoint_max", "keep_checkpoint_every_n_hours", "log_step_count_steps",
    )  # fmt: skip
    return RunConfig(**{name: getattr(config, name) for name in fields if getattr(config, name) is not None})


class CrossShardOptimizer(_CrossShardOptimizer):
    """Trains with the inner optimizer: there is one shard here, whose gradients are their own mean.

    Ranks of a job are not shards: the distribution of the script's own NPU optimizer reduces over ranks.
    """

    def compute_gradients(self, loss, var_list=None, **kwargs):
        """Calls the inner optimizer."""
        return self._opt.compute_gradients(loss, var_list=var_list, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Calls the inner optimizer."""
        return self._opt.apply_gradients(grads_and_vars, global_step, name)
