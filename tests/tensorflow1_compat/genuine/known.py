"""Lists differences from TensorFlow 1.15 and omissions, with reasons; `docs/tensorflow1.md` has the same in words."""

from __future__ import annotations

# A case -> why it differs.
DIFFERENT = {
    "layers.crossed_column": "another hash of combinations, and the batch is not known while the graph is made",
    "layers.shared_embedding_columns": "the variable has the column's name, not that of the first of its columns",
    "training.RandomStrategy": "another random task",
}

_NEWER = "TensorFlow 2.15's own, with more arguments or other defaults"
# A name whose arguments are others -> why.
DIFFERENT_SIGNATURES = {
    "autograph.converted_call": _NEWER,
    "autograph.to_code": _NEWER,
    "autograph.to_graph": _NEWER,
    "cluster_resolver.SlurmClusterResolver": _NEWER,
    "data.make_batched_features_dataset": "the default reader None is the same TFRecordDataset",
    "distribute.AllReduceCrossDeviceOps": _NEWER,
    "distribute.CollectiveAllReduceStrategy": _NEWER,
    "estimator.binary_classification_head": "heads take tf.keras.losses.Reduction",
    "estimator.logistic_regression_head": "heads take tf.keras.losses.Reduction",
    "estimator.multi_class_head": "heads take tf.keras.losses.Reduction",
    "estimator.multi_label_head": "heads take tf.keras.losses.Reduction",
    "estimator.poisson_regression_head": "heads take tf.keras.losses.Reduction, and label_dimension comes first",
    "estimator.regression_head": "heads take tf.keras.losses.Reduction, and label_dimension comes first",
    "estimator.replicate_model_fn": "one rank has one device: the loss is not reduced",
}

# (module, names without a case) -> why.
NOT_COVERED = {
    ("autograph", "convert converted_call do_not_convert to_code to_graph"): "TensorFlow's own; they make Python code",
    ("checkpoint", "CheckpointManager"): "TensorFlow's own",
    ("cluster_resolver", "ClusterResolver GCEClusterResolver KubernetesClusterResolver SimpleClusterResolver "
     "SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver UnionClusterResolver"): "TensorFlow's own",
    ("cudnn_rnn", "CudnnGRU CudnnLSTM CudnnRNNRelu CudnnRNNTanh"): "the genuine ones need a GPU",
    ("data", "CheckpointInputPipelineHook SqlDataset TFRecordWriter make_batched_features_dataset make_csv_dataset "
     "make_saveable_from_iterator prefetch_to_device read_batch_features"): "TensorFlow's own",
    ("distribute", "AllReduceCrossDeviceOps CollectiveAllReduceStrategy CrossDeviceOps DistributeConfig "
     "DistributionStrategy MirroredStrategy OneDeviceStrategy ParameterServerStrategy get_distribution_strategy "
     "get_loss_reduction get_replica_context get_strategy has_distribution_strategy has_strategy "
     "in_cross_replica_context"): "one rank has one device here",
    ("estimator", "TowerOptimizer add_metrics binary_classification_head build_raw_supervised_input_receiver_fn "
     "call_logit_fn dnn_logit_fn_builder forward_features linear_logit_fn_builder logistic_regression_head "
     "multi_class_head multi_head multi_label_head poisson_regression_head regression_head "
     "replicate_model_fn"): "the heads are those of TensorFlow 2.15",
    ("opt", "ExternalOptimizerInterface ScipyOptimizerInterface"): "steps of SciPy: `contrib_cases/of_training.py`",
    ("predictor", "from_estimator"): "`from_saved_model` after an export",
    ("summary", "SummaryWriter all_summary_ops always_record_summaries audio create_file_writer "
     "create_summary_file_writer eval_dir flush generic graph histogram image import_event initialize "
     "never_record_summaries record_summaries_every_n_global_steps scalar should_record_summaries "
     "summary_writer_initializer_op"): "they write files",
    ("tfprof", "ProfileContext"): "it writes files",
    ("tpu", "AsyncCheckpointSaverHook CrossShardOptimizer DeviceAssignment InputPipelineConfig RunConfig TPUConfig "
     "TPUEstimator TPUEstimatorSpec Topology batch_parallel bfloat16_scope core cross_replica_sum device_assignment "
     "initialize_system outside_compilation replicate rewrite shard shutdown_system"): "the genuine ones need a TPU",
    ("training", "FeedingQueueRunner"): "Estimator's own",
    ("training", "bucket bucket_by_sequence_length"): "queues of examples: `contrib_cases/of_training.py`",
    ("slim", "bucketize"): "a name that TF-Slim exports by accident",
}  # fmt: skip
