"""Finds replacements of TensorFlow 1.15's internal modules by rules, for names without an entry in the tables."""

from __future__ import annotations

import importlib
from typing import Any

from tensorflow1_compat.tables import MODULES

__all__ = ["SPLIT", "find_replacement_of_inner_module", "find_replacement_of_contrib", "find_moved_value"]

_CONTRIB = "tensorflow.contrib"

# Modules below `tensorflow.python` that were split later -> the modules that have their names now.
SPLIT: dict[str, str] = {
    "eager.function": "eager.polymorphic_function.polymorphic_function eager.polymorphic_function.concrete_function",
    "framework.graph_util": "framework.convert_to_constants",
    "framework.graph_util_impl": "framework.convert_to_constants",
    "framework.ops": "framework.tensor framework.indexed_slices framework.tensor_conversion "
    "framework.tensor_conversion_registry",
    "framework.tensor_util": "ops.shape_util",
    "ops.array_ops": "ops.array_ops_stack",
    "ops.control_flow_ops": "ops.cond ops.while_loop ops.control_flow_assert ops.control_flow_case "
    "ops.control_flow_switch_case",
    "ops.gen_math_ops": "ops.gen_special_math_ops",
    "ops.math_ops": "ops.bincount_ops",
    "ops.random_ops": "ops.random_crop_ops",
    "ops.variable_scope": "ops.ref_variable ops.resource_variable_ops",
    "ops.variables": "ops.variable_v1 ops.ref_variable",
    "saved_model.utils_impl": "saved_model.path_helpers",
}
# Leaves of `tensorflow.contrib.X.python...` that were modules. Without an entry above, such a leaf is module X here.
_INNER = """
    adam_gs_optimizer adamax addsign alexnet alpha_dropout attention_wrapper basic_decoder batching beam_search_decoder
    beam_search_ops benchmarking bucket_ops bucketization_op checkpoint_convert checkpoint_ops classification common
    confusion_matrix_ops containers contrib_estimator_predictor core_estimator_predictor core_rnn_cell counter crf
    cross_entropy cudnn_rnn cudnn_rnn_ops data data_decoder data_provider dataset dataset_data_provider decoder
    dense_image_warp device_setter distort_image_ops drop_stale_gradient_optimizer early_stopping edit
    elastic_average_optimizer embedding_ops encoders enumerate_ops error_ops estimator evaluation export exporter
    extenders external_optimizer fake_summary_writer feature_column feature_column_ops feeding_queue_runner
    fold_batch_norms framework functional_rnn fused_rnn_cell fwd_gradients gen_resampler_ops get_single_element ggt
    graph_matcher graph_util grouping gru_ops head helper histogram_ops hparam image_ops inception inception_v1
    inception_v2 inception_v3 initializers input_to_ops interleave_ops interpolate_spline iterator_ops kernel_tests
    lars_optimizer layers lazy_adam_gs_optimizer lazy_adam_optimizer learn learning loader logit_fns lookup_ops loss
    loss_ops loss_scale_manager loss_scale_optimizer losses lstm_ops matrix_functions metric_learning metric_loss_ops
    metric_ops metrics model_analyzer model_average_optimizer moving_average_optimizer multi_head
    multitask_optimizer_wrapper nadam_optimizer nets normalization ops optimizers overfeat parallel_reader parsing_ops
    powersign predictor_factories prefetch_queue prefetching_ops prettyprint_ops python python_state quant_ops quantize
    quantize_graph queues random_ops reader readers recurrent reg_adagrad_optimizer regularizers replicate_model_fn
    resample resampler_ops resampling resnet_utils resnet_v1 resnet_v2 rev_block_lib rnn rnn_cell sampler sampling_ops
    saved_model saved_model_estimator saved_model_predictor scaled_softplus scan_ops script_ops seq2seq
    sequence_queueing_state_saver set_ops shampoo shuffle_ops sign_decay single_image_random_dot_stereograms sliding
    slim sort_ops sparse_feature_cross_op sparse_image_warp sparse_ops sparsemax sparsemax_loss split_dependency
    summaries target_column tensor_util tfe tfexample_decoder threadpool tools tpu tpu_config tpu_estimator
    tpu_optimizer training tuner unique util_test utils variable_clipping_optimizer vgg visualize
    weight_decay_optimizers writers
"""
_inner = frozenset(_INNER.split())


def find_replacement_of_inner_module(name: str) -> str | None:
    """Returns the name of the module that replaces an internal module of `tf.contrib`; None for other names.

    For example, `nn.python.ops.alpha_dropout` is a module, but `nn.alpha_dropout` is a function. The one exception in
    1.15 is `framework.python.ops.arg_scope`, a function, which is in the tables.
    """
    parts = name.split(".")
    if not name.startswith(f"{_CONTRIB}.") or len(parts) < 4 or parts[-1] not in _inner:
        return None
    if parts[-1] == parts[-2] != "ops" or (parts[3] not in ("python", "ops") and parts[2] != "predictor"):
        return None
    return find_replacement_of_contrib(name)


def find_replacement_of_contrib(name: str) -> str:
    """Returns the name of the module that replaces `tensorflow.contrib.X`, given any name below `X`."""
    parts = name.split(".")
    of_contrib = ".".join(parts[:3])
    return MODULES.get(of_contrib, f"tensorflow1_compat.contrib.{parts[2]}")


def find_moved_value(module_name: str, name: str) -> Any:
    """Returns the value of a name in one of the modules into which TensorFlow has split `module_name`.

    Raises:
      AttributeError: none of the modules into which `module_name` was split has the name.
    """
    for part in SPLIT.get(module_name.removeprefix("tensorflow.python."), "").split():
        module = importlib.import_module(f"tensorflow.python.{part}")
        if name in vars(module):
            return vars(module)[name]
    raise AttributeError(name)
