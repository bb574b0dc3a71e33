"""Holds, as plain data, the interface of TensorFlow 1.15.5's classes that this package extends or replaces.

Listed by that TensorFlow itself: methods with their arguments in order, and other attributes.
"""


def _attributes(names):
    return dict.fromkeys(names.split())


_HOOK = {
    "after_create_session": "session coord",
    "after_run": "run_context run_values",
    "before_run": "run_context",
    "begin": "",
    "end": "session",
}
_SESSION = {
    "__enter__": "",
    "__exit__": "exec_type exec_value exec_tb",
    "__init__": "target graph config",
    "as_default": "",
    "close": "",
    "graph": None,
    "graph_def": None,
    "list_devices": "",
    "make_callable": "fetches feed_list accept_options",
    "partial_run": "handle fetches feed_dict",
    "partial_run_setup": "fetches feeds",
    "reset": "target containers config",
    "run": "fetches feed_dict options run_metadata",
    "sess_str": None,
}
METHODS: dict[str, dict[str, str | None]] = {
    "estimator.Estimator": {
        "__init__": "model_fn model_dir config params warm_start_from",
        "config": None,
        "eval_dir": "name",
        "evaluate": "input_fn steps hooks checkpoint_path name",
        "experimental_export_all_saved_models": (
            "export_dir_base input_receiver_fn_map assets_extra as_text checkpoint_path"
        ),
        "export_saved_model": (
            "export_dir_base serving_input_receiver_fn assets_extra as_text checkpoint_path experimental_mode"
        ),
        "export_savedmodel": (
            "export_dir_base serving_input_receiver_fn assets_extra as_text checkpoint_path strip_default_attrs"
        ),
        "get_variable_names": "",
        "get_variable_value": "name",
        "latest_checkpoint": "",
        "model_dir": None,
        "model_fn": None,
        "params": None,
        "predict": "input_fn predict_keys hooks checkpoint_path yield_single_examples",
        "train": "input_fn hooks steps max_steps saving_listeners",
    },
    "estimator.RunConfig": {
        "__init__": (
            "model_dir tf_random_seed save_summary_steps save_checkpoints_steps save_checkpoints_secs "
            "session_config keep_checkpoint_max keep_checkpoint_every_n_hours log_step_count_steps "
            "train_distribute device_fn protocol eval_distribute experimental_distribute "
            "experimental_max_worker_delay_secs session_creation_timeout_secs"
        ),
        "replace": "",
        **_attributes(
            "cluster_spec device_fn eval_distribute evaluation_master experimental_max_worker_delay_secs "
            "global_id_in_cluster is_chief keep_checkpoint_every_n_hours keep_checkpoint_max log_step_count_steps "
            "master model_dir num_ps_replicas num_worker_replicas protocol save_checkpoints_secs "
            "save_checkpoints_steps save_summary_steps service session_config session_creation_timeout_secs "
            "task_id task_type tf_random_seed train_distribute"
        ),
    },
    "estimator.EstimatorSpec": {
        "__init__": "",
        "count": "value",
        "index": "value start stop",
        **_attributes(
            "eval_metric_ops evaluation_hooks export_outputs loss mode prediction_hooks predictions scaffold "
            "train_op training_chief_hooks training_hooks"
        ),
    },
    "train.Optimizer": {
        "GATE_GRAPH": None,
        "GATE_NONE": None,
        "GATE_OP": None,
        "__init__": "use_locking name",
        "apply_gradients": "grads_and_vars global_step name",
        "compute_gradients": "loss var_list gate_gradients aggregation_method colocate_gradients_with_ops grad_loss",
        "get_name": "",
        "get_slot": "var name",
        "get_slot_names": "",
        "minimize": (
            "loss global_step var_list gate_gradients aggregation_method colocate_gradients_with_ops name grad_loss"
        ),
        "variables": "",
    },
    "train.Saver": {
        "__init__": (
            "var_list reshape sharded max_to_keep keep_checkpoint_every_n_hours name restore_sequentially "
            "saver_def builder defer_build allow_empty write_version pad_step_number save_relative_paths "
            "filename"
        ),
        "as_saver_def": "",
        "build": "",
        "export_meta_graph": (
            "filename collection_list as_text export_scope clear_devices clear_extraneous_savers "
            "strip_default_attrs save_debug_info"
        ),
        "from_proto": "saver_def import_scope",
        "last_checkpoints": None,
        "recover_last_checkpoints": "checkpoint_paths",
        "restore": "sess save_path",
        "save": (
            "sess save_path global_step latest_filename meta_graph_suffix write_meta_graph write_state "
            "strip_default_attrs save_debug_info"
        ),
        "set_last_checkpoints": "last_checkpoints",
        "set_last_checkpoints_with_time": "last_checkpoints_with_time",
        "to_proto": "export_scope",
    },
    "train.CheckpointSaverHook": {
        "__init__": "checkpoint_dir save_secs save_steps saver checkpoint_basename scaffold listeners",
        **_HOOK,
    },
    "train.LoggingTensorHook": {
        "__init__": "tensors every_n_iter every_n_secs at_end formatter",
        **_HOOK,
    },
    "train.SessionRunHook": {
        **_HOOK,
    },
    "Session": _SESSION,
    "InteractiveSession": {
        name: arguments for name, arguments in _SESSION.items() if name not in ("__enter__", "__exit__", "reset")
    },
}
