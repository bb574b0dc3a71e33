"""Holds the run configuration, estimator, optimizers, loss-scale managers and hooks in their documented modules."""

from npu_bridge.base.lazy import lazy_getattr, places_of_submodules

__all__ = [
    "keras_to_npu",
    "npu_callbacks",
    "npu_config",
    "npu_convert_dropout",
    "npu_dynamic_rnn",
    "npu_estimator",
    "npu_hook",
    "npu_loss_scale_manager",
    "npu_loss_scale_optimizer",
    "npu_optimizer",
    "npu_plugin",
    "npu_rnn",
    "npu_saver",
    "npu_scope",
    "npu_strategy",
    "util",
]

__getattr__ = lazy_getattr(__name__, places_of_submodules(__name__, *__all__))
