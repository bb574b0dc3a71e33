"""Lists private names that this package's classes override in TensorFlow's base classes, or use through `self`.

A subclass cannot reach these through a function. Seen in TensorFlow 2.15.1, Keras 2.15.0 and Estimator 2.15.0; names
below `keras` in Keras 3.15.1.
"""

from __future__ import annotations

# By the public name of the base class.
INHERITED: dict[str, tuple[str, ...]] = {
    "tensorflow.compat.v1.Session": (
        "_call_tf_sessionprun",
        "_call_tf_sessionrun",
        "_do_run",
        "_make_callable_from_options",
    ),
    "tensorflow.compat.v1.train.Optimizer": (
        "_apply_dense",
        "_apply_sparse",
        "_call_if_callable",
        "_create_non_slot_variable",
        "_create_slots",
        "_finish",
        "_get_non_slot_variable",
        "_get_or_make_slot_with_initializer",
        "_prepare",
        "_resource_apply_dense",
        "_resource_apply_sparse",
        "_use_locking",
        "_zeros_slot",
    ),
    "tensorflow.keras.optimizers.Optimizer": (
        "_build_learning_rate",
        "_compute_current_learning_rate",
        "_create_or_restore_slot_variable",
        "_distributed_apply_gradients_fn",
        "_index_dict",
        "_learning_rate",
        "_serialize_hyperparameter",
        "_use_weight_decay",
        "_var_key",
    ),
    "tensorflow.keras.optimizers.legacy.Optimizer": (
        "_HAS_AGGREGATE_GRAD",
        "_aggregate_gradients",
        "_compute_gradients",
        "_create_all_weights",
        "_create_hypers",
        "_create_or_restore_slot_variable",
        "_create_slots",
        "_decayed_lr",
        "_get_hyper",
        "_name",
        "_resource_apply_dense",
        "_resource_apply_sparse",
        "_restore_slot_variable",
        "_serialize_hyperparameter",
        "_set_hyper",
        "_transform_gradients",
    ),
    "keras.optimizers.Optimizer": ("_distributed_tf_update_step", "_get_variable_index", "_use_weight_decay"),
    "tensorflow.keras.layers.BatchNormalization": ("_param_dtype",),
    "tensorflow.estimator.Estimator": (
        "_assert_members_are_not_overridden",
        "_call_input_fn",
        "_convert_train_steps_to_hooks",
        "_evaluate_run",
        "_export_all_saved_models",
        "_train_with_estimator_spec",
        "_warm_start_settings",
    ),
    "tensorflow.estimator.EstimatorSpec": ("_replace",),
    "tensorflow.estimator.RunConfig": (
        "_device_fn",
        "_log_step_count_steps",
        "_save_checkpoints_secs",
        "_save_checkpoints_steps",
        "_save_summary_steps",
        "_session_config",
        "_tf_random_seed",
    ),
    "tensorflow.estimator.CheckpointSaverHook": ("_checkpoint_dir", "_get_saver", "_save", "_timer"),
    "tensorflow.estimator.LoggingTensorHook": ("_current_tensors", "_iter_count"),
}
