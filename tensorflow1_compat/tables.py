"""Maps names of TensorFlow 1.15 that `tensorflow.compat.v1` lacks to current names.

Modules of `tensorflow1_compat.contrib` need no entry here: each replaces the module of the same name in
`tensorflow.contrib`. Names that `tensorflow.compat.v1` has unchanged need no entry either.
"""

from __future__ import annotations

from typing import NamedTuple

from npu_bridge.base.tf_internals.names import KERAS

_CONTRIB = "tensorflow1_compat.contrib"
_OLD = "tensorflow.contrib"
_MNIST = f"{_CONTRIB}.learn.datasets.mnist"
_KERAS = f"{KERAS}.api._v1.keras"
_INNER_KERAS = "tensorflow.python.keras"
# Modules with the same name in their new package.
_SLIM_LAYERS = ("initializers", "layers", "normalization", "optimizers", "regularizers", "utils")
_PUBLIC_KERAS = ("applications", "layers", "models", "optimizers", "preprocessing", "utils")

# Parts of the real TensorFlow with the same name in 1.15; other modules below `tensorflow` are version 2.
INSIDES = ("tensorflow.python", "tensorflow.core", "tensorflow.compiler", "tensorflow.tools", "tensorflow.lite")

# Old module -> its replacement. Modules below the old one are looked up below the new one.
MODULES: dict[str, str] = {
    "keras": _KERAS,
    "keras.legacy": "tensorflow1_compat.old_keras",
    "keras.legacy.interfaces": "tensorflow1_compat.old_keras",
    "keras.objectives": f"{_KERAS}.losses",
    "npu_ops": "npu_bridge.estimator.npu_ops",
    "tensorflow": "tensorflow.compat.v1",
    "tensorflow.compat.v1": "tensorflow.compat.v1",
    "tensorflow.contrib": _CONTRIB,
    "tensorflow.keras": _KERAS,
    # Inner modules of contrib.
    f"{_OLD}.framework.python.framework.checkpoint_utils": "tensorflow.python.training.checkpoint_utils",
    f"{_OLD}.framework.nest": "tensorflow.python.util.nest",
    f"{_OLD}.framework.python.ops.arg_scope": "tf_slim.ops.arg_scope",
    f"{_OLD}.framework.python.ops.audio_ops": "tensorflow.python.ops.gen_audio_ops",
    f"{_OLD}.framework.python.ops.variables": "tf_slim.ops.variables",
    f"{_OLD}.image.ops": "tensorflow.python.ops",
    **{f"{_OLD}.layers.python.layers.{name}": f"tf_slim.layers.{name}" for name in _SLIM_LAYERS},
    f"{_OLD}.layers.python.ops.sparse_ops": "tf_slim.layers.sparse_ops",
    f"{_OLD}.learn.python.learn.monitored_session": "tensorflow.python.training.monitored_session",
    f"{_OLD}.lookup.lookup_ops": f"{_CONTRIB}.lookup",
    f"{_OLD}.losses.python.metric_learning": "tf_slim.losses.metric_learning",
    f"{_OLD}.mixed_precision": "npu_bridge.estimator.contrib_mixed_precision",
    f"{_OLD}.metrics.python.ops.metric_ops": "tf_slim.metrics.metric_ops",
    f"{_OLD}.rnn.ops.gen_lstm_ops": "tensorflow.python.ops.gen_rnn_ops",
    f"{_OLD}.rnn.python.ops.core_rnn_cell": f"{_CONTRIB}.rnn.wrappers",
    f"{_OLD}.rnn.python.ops.lstm_ops": f"{_CONTRIB}.rnn.blocks",
    f"{_OLD}.rnn.python.ops.rnn_cell": f"{_CONTRIB}.rnn.cells",
    f"{_OLD}.seq2seq.python.ops.attention_wrapper": f"{_CONTRIB}.seq2seq.attention_wrapper",
    f"{_OLD}.seq2seq.python.ops.decoder": f"{_CONTRIB}.seq2seq.decoder",
    f"{_OLD}.seq2seq.python.ops.helper": f"{_CONTRIB}.seq2seq.helper",
    f"{_OLD}.slim.nets": "tf_slim.nets",
    f"{_OLD}.slim.python.slim.data": "tf_slim.data",
    f"{_OLD}.slim.python.slim.learning": "tf_slim.learning",
    f"{_OLD}.slim.python.slim.nets": "tf_slim.nets",
    f"{_OLD}.tpu.python.ops.tpu_ops": f"{_CONTRIB}.tpu.ops",
    f"{_OLD}.tpu.python.tpu": "tensorflow.python.tpu",
    f"{_OLD}.training.python.training.evaluation": "tf_slim.training.evaluation",
    f"{_OLD}.training.python.training.training": "tf_slim.training.training",
    f"{_OLD}.distribute.python": "tensorflow.python.distribute",
    f"{_OLD}.image.ops.gen_image_ops": "tensorflow.python.ops.gen_image_ops",
    f"{_OLD}.all_reduce.python.all_reduce": "tensorflow.python.distribute.v1.all_reduce",
    # Elsewhere in TensorFlow.
    "tensorflow.python.estimator": "tensorflow_estimator.python.estimator",
    "tensorflow.python.layers.layers": f"{_KERAS}.__internal__.legacy.layers",
    "tensorflow.examples": f"{_CONTRIB}.learn.datasets",
    "tensorflow.examples.tutorials": f"{_CONTRIB}.learn.datasets",
    "tensorflow.examples.tutorials.mnist": f"{_CONTRIB}.learn.datasets",
    "tensorflow.examples.tutorials.mnist.input_data": _MNIST,
    "tensorflow.python.data.experimental.ops.threadpool": "tensorflow1_compat.threadpool",
    "tensorflow.python.distribute.distribution_strategy_context": "tensorflow.python.distribute.distribute_lib",
    "tensorflow.python.training.distribution_strategy_context": "tensorflow.python.distribute.distribute_lib",
    "tensorflow.pywrap_tensorflow": "tensorflow.python.pywrap_tensorflow",
    "tensorflow.tools.graph_transforms": "tensorflow1_compat.graph_transforms",
    "tensorflow.python.training.tracking": "tensorflow.python.trackable",
    "tensorflow.python.training.tracking.graph_view": "tensorflow.python.checkpoint.graph_view",
    "tensorflow.python.training.tracking.util": "tensorflow.python.checkpoint.checkpoint",
    "tensorflow.python.training.saving.functional_saver": "tensorflow.python.checkpoint.functional_saver",
    "tensorflow.python.training.tracking.tracking": "tensorflow.python.trackable.autotrackable",
    _INNER_KERAS: f"{KERAS}.src",
    f"{_INNER_KERAS}._impl": f"{KERAS}.src",
    f"{_INNER_KERAS}._impl.keras": _KERAS,
    **{f"{_INNER_KERAS}.{name}": f"{_KERAS}.{name}" for name in _PUBLIC_KERAS},
    f"{_INNER_KERAS}.datasets": f"{KERAS}.src.datasets",
    f"{_INNER_KERAS}.keras_parameterized": f"{KERAS}.src.testing_infra.test_combinations",
    f"{_INNER_KERAS}.testing_utils": f"{KERAS}.src.testing_infra.test_utils",
}

# Modules of stand-alone Keras that are one module now, under every name that scripts import.
_KERAS_LAYERS = (
    "advanced_activations", "convolutional", "convolutional_recurrent", "core", "cudnn_recurrent", "embeddings",
    "local", "merge", "noise", "normalization", "pooling", "recurrent", "wrappers",
)  # fmt: skip
# Layers and cells of version 1 must be Keras's classes under every path; TensorFlow has a second copy of them.
for _name in ("base", "convolutional", "core", "normalization", "pooling"):
    MODULES[f"tensorflow.python.layers.{_name}"] = f"{KERAS}.src.legacy_tf_layers.{_name}"
for _root in ("keras", "tensorflow.keras", _INNER_KERAS, f"{_INNER_KERAS}._impl.keras"):
    MODULES.update({f"{_root}.layers.{_name}": f"{_KERAS}.layers" for _name in _KERAS_LAYERS})
    MODULES[f"{_root}.backend.tensorflow_backend"] = f"{KERAS}.src.backend"  # it has private names, too
    MODULES[f"{_root}.engine.network"] = "tensorflow1_compat.old_keras"
    MODULES[f"{_root}.engine.saving"] = f"{KERAS}.src.saving.legacy.hdf5_format"
    MODULES[f"{_root}.engine.topology"] = "tensorflow1_compat.old_keras"
    MODULES[f"{_root}.mixed_precision.experimental"] = "tensorflow1_compat.keras_policies"
    for _name in ("hdf5_format", "model_config", "save", "saved_model", "saving_utils"):
        MODULES[f"{_root}.saving.{_name}"] = f"{KERAS}.src.saving.legacy.{_name}"
    MODULES[f"{_root}.optimizer_v2"] = f"{KERAS}.src.optimizers.legacy"
    MODULES[f"{_root}.optimizer_v2.optimizer_v2"] = f"{KERAS}.src.optimizers.legacy.optimizer_v2"

# "old.module.attribute" -> "module:attribute" (`module` alone is the module itself), imported on first use.
_V1 = "tensorflow.compat.v1"
_PYTHON = "tensorflow.python"
NAMES: dict[str, str] = {
    "tensorflow.app.flags": f"{_V1}:flags",
    "tensorflow.app.UsageError": "absl.app:UsageError",
    "tensorflow.core.protobuf.config_pb2.RPCOptions": "tensorflow.core.protobuf.rpc_options_pb2:RPCOptions",
    "tensorflow.math.maximum": "tensorflow1_compat.old_rules:maximum",
    "tensorflow.math.minimum": "tensorflow1_compat.old_rules:minimum",
    "tensorflow.maximum": "tensorflow1_compat.old_rules:maximum",
    "tensorflow.minimum": "tensorflow1_compat.old_rules:minimum",
    "tensorflow.nn.conv2d_transpose": "tensorflow1_compat.old_rules:conv2d_transpose",
    "tensorflow.summary.all_summary_ops": f"{_CONTRIB}.summary:all_summary_ops",
    "tensorflow.summary.always_record_summaries": f"{_CONTRIB}.summary:always_record_summaries",
    "tensorflow.summary.create_file_writer": f"{_CONTRIB}.summary:create_file_writer",
    f"{_OLD}.framework.python.ops.arg_scope": f"{_CONTRIB}.framework:arg_scope",
    f"{_OLD}.framework.nest.is_sequence": f"{_PYTHON}.util.nest:is_nested",
    f"{_OLD}.image.python.ops.dense_image_warp._interpolate_bilinear": (
        "tensorflow_addons.image.dense_image_warp:interpolate_bilinear"
    ),
    f"{_OLD}.rnn.python.ops.rnn_cell._Linear": f"{_CONTRIB}.rnn.linear:_Linear",
    f"{_OLD}.slim.embed_sequence": f"{_CONTRIB}.layers:embed_sequence",
    f"{_OLD}.tpu.tpu": f"{_CONTRIB}.tpu",
    f"{_PYTHON}.control_flow_ops": f"{_PYTHON}.ops.control_flow_ops",
    f"{_PYTHON}.distribute.distribution_strategy_context.get_tower_context": (
        f"{_PYTHON}.distribute.distribute_lib:get_replica_context"
    ),
    f"{_PYTHON}.eager.context.list_devices": f"{_V1}.config:list_logical_devices",
    f"{_PYTHON}.framework.op_def_registry.get_registered_ops": "tensorflow1_compat.old_rules:get_registered_ops",
    f"{_PYTHON}.framework.test_util.run_in_graph_and_eager_modes": (
        "tensorflow1_compat.test_util:run_in_graph_and_eager_modes"
    ),
    # TensorFlow 2.15 asks the converters of a class and keeps no list of classes: a function that does nothing.
    f"{_PYTHON}.framework.ops.register_dense_tensor_like_type": "builtins:callable",
    f"{_PYTHON}.graph_util": f"{_V1}.graph_util",
    f"{_PYTHON}.layers.base.InputSpec": f"{_KERAS}.layers:InputSpec",
    f"{_PYTHON}.math_ops": f"{_PYTHON}.ops.math_ops",
    f"{_PYTHON}.ops.control_dependencies": f"{_V1}:control_dependencies",
    f"{_PYTHON}.ops.convert_to_tensor": f"{_V1}:convert_to_tensor",
    f"{_PYTHON}.ops.gen_nn_ops._max_pool_grad": f"{_PYTHON}.ops.gen_nn_ops:max_pool_grad",
    f"{_PYTHON}.ops.gradients_impl._AggregateIndexedSlicesGradients": (
        f"{_PYTHON}.eager.backprop_util:AggregateIndexedSlicesGradients"
    ),
    f"{_PYTHON}.ops.variable_scope.variable": f"{_V1}:Variable",
    f"{_PYTHON}.pywrap_tensorflow.NewCheckpointReader": f"{_V1}.train:NewCheckpointReader",
    "tensorflow.pywrap_tensorflow.NewCheckpointReader": f"{_V1}.train:NewCheckpointReader",
    f"{_PYTHON}.state_ops": f"{_PYTHON}.ops.state_ops",
    f"{_PYTHON}.summary.FileWriter": f"{_V1}.summary:FileWriter",
    f"{_PYTHON}.util.nest.is_sequence": f"{_PYTHON}.util.nest:is_nested",
}
for _name in (
    "BasicLSTMCell", "BasicRNNCell", "DeviceWrapper", "DropoutWrapper", "GRUCell", "LSTMCell", "LSTMStateTuple",
    "LayerRNNCell", "MultiRNNCell", "RNNCell", "ResidualWrapper",
):  # fmt: skip
    for _root in ("rnn_cell", "rnn_cell_impl"):
        NAMES[f"{_PYTHON}.ops.{_root}.{_name}"] = f"{_CONTRIB}.rnn:{_name}"
for _root in ("keras", "tensorflow.keras", _INNER_KERAS):
    for _name in (
        "backend.get_session", "backend.image_dim_ordering", "backend.set_image_dim_ordering", "backend.set_session",
        "utils.multi_gpu_model", "layers.Deconvolution2D", "layers.Deconvolution3D",
    ):  # fmt: skip
        NAMES[f"{_root}.{_name}"] = f"tensorflow1_compat.old_keras:{_name.rpartition('.')[2]}"
    NAMES[f"{_root}.utils.generic_utils.CustomObjectScope"] = f"{_KERAS}.utils:CustomObjectScope"
    NAMES[f"{_root}.utils.generic_utils.get_custom_objects"] = f"{_KERAS}.utils:get_custom_objects"
    NAMES[f"{_root}.engine.Input"] = f"{_KERAS}.layers:Input"
    NAMES[f"{_root}.engine.Layer"] = f"{_KERAS}.layers:Layer"
    NAMES[f"{_root}.engine.InputSpec"] = f"{_KERAS}.layers:InputSpec"
    NAMES[f"{_root}.engine.Model"] = f"{_KERAS}.models:Model"
# Optimizers with other defaults than those of `tf.keras.optimizers`; only 1.15 and its Keras had them.
OLD_OPTIMIZERS: dict[str, str] = {}
for _root, _owner in (("keras", "of_keras"), (_INNER_KERAS, "of_tensorflow"), (f"{_OLD}.keras", "of_tensorflow")):
    for _name in ("Adadelta", "Adagrad", "Adam", "Adamax", "Nadam", "RMSprop", "SGD"):
        _place = f"tensorflow1_compat.old_optimizers:{_owner}.{_name}"
        OLD_OPTIMIZERS |= {f"{_root}.optimizers.{_name}": _place, f"{_root}.optimizers.{_name.lower()}": _place}
    OLD_OPTIMIZERS[f"{_root}.optimizers.Optimizer"] = "tensorflow1_compat.old_optimizers:Optimizer"
    OLD_OPTIMIZERS[f"{_root}.optimizers.TFOptimizer"] = f"{KERAS}.src.optimizers.optimizer_v1:TFOptimizer"
OLD_OPTIMIZERS |= {f"keras.optimizers.{_name}": f"{KERAS}.src.optimizers:{_name}" for _name in ("deserialize", "get")}

# A name or module that cannot exist here -> its replacement, as the second half of a sentence.
GONE: dict[str, str] = {
    "tensorflow.LegacySyncReplicasOptimizer": "tf.train.SyncReplicasOptimizer",
    "tensorflow.Supervisor": "tf.train.Supervisor",
    "tensorflow.assign_moving_average": "tensorflow.python.training.moving_averages.assign_moving_average",
    "tensorflow.concat_v2": "tf.concat",
    "tensorflow.histogram_summary": "tf.summary.histogram",
    "tensorflow.image.per_image_whitening": "tf.image.per_image_standardization",
    "tensorflow.image_summary": "tf.summary.image",
    "tensorflow.initialize_local_variables": "tf.local_variables_initializer",
    "tensorflow.merge_all_summaries": "tf.summary.merge_all",
    "tensorflow.merge_summary": "tf.summary.merge",
    "tensorflow.mul": "tf.multiply",
    "tensorflow.neg": "tf.negative",
    "tensorflow.nn.seq2seq": "tf.contrib.legacy_seq2seq",
    "tensorflow.pack": "tf.stack",
    "tensorflow.scalar_summary": "tf.summary.scalar",
    "tensorflow.sub": "tf.subtract",
    "tensorflow.train.SummaryWriter": "tf.summary.FileWriter",
    "tensorflow.unpack": "tf.unstack",
    f"{_OLD}.cloud": "tf.data with a client of BigTable",
    f"{_OLD}.coder": "the package tensorflow-compression",
    f"{_OLD}.compiler": "jit_compile of tf.function, or global_jit_level of a session's options, for XLA",
    f"{_OLD}.distribute": "tf.distribute, or npu-run -np N and the distribution of an NPUOptimizer",
    f"{_OLD}.distributions": "tensorflow_probability.distributions (pip install tensorflow-probability==0.23)",
    f"{_OLD}.eager": "tf.GradientTape, tf.function and tf.train.Checkpoint",
    f"{_OLD}.factorization": "tf.estimator.experimental.KMeans, or scikit-learn for the rest",
    f"{_OLD}.ffmpeg": "the package tensorflow-io, or tf.audio for WAV files",
    f"{_OLD}.gan": "the package tensorflow-gan",
    f"{_OLD}.hadoop": "the package tensorflow-io",
    f"{_OLD}.integrate": "scipy.integrate.solve_ivp in a tf.py_func, or tfp.math.ode of tensorflow-probability",
    f"{_OLD}.kafka": "the package tensorflow-io",
    f"{_OLD}.learn": "tf.estimator, or tf.data for its readers",
    f"{_OLD}.learn.preprocessing": "tf.keras.preprocessing.text.Tokenizer",
    f"{_OLD}.model_pruning": "the package tensorflow-model-optimization",
    f"{_OLD}.opt.AddSignOptimizer": "tf.train.AdamOptimizer",
    f"{_OLD}.opt.ElasticAverageOptimizer": "the distribution of an NPUOptimizer, which averages gradients over ranks",
    f"{_OLD}.opt.ModelAverageOptimizer": "the distribution of an NPUOptimizer, which averages gradients over ranks",
    f"{_OLD}.opt.PowerSignOptimizer": "tf.train.AdamOptimizer",
    f"{_OLD}.opt.ShampooOptimizer": "LARSOptimizer or AdamWOptimizer of this module",
    f"{_OLD}.quantize.python": "tf.contrib.quantize.create_training_graph, which has another rewriter",
    f"{_OLD}.reduce_slice_ops": "tf.math.segment_sum and its relatives",
    f"{_OLD}.rpc": "tf.py_func with an RPC client",
    f"{_OLD}.session_bundle": "tf.saved_model.loader",
    f"{_OLD}.solvers": "tf.linalg.experimental.conjugate_gradient",
    f"{_OLD}.specs": "tf.contrib.slim",
    f"{_OLD}.tensor_forest": "the package tensorflow-decision-forests",
    f"{_OLD}.tensorrt": "the device's own converter",
    f"{_OLD}.timeseries": "the package tensorflow-probability",
    f"{_OLD}.training.SequenceQueueingStateSaver": "tf.data and the state of tf.nn.dynamic_rnn",
    f"{_OLD}.training.batch_sequences_with_states": "tf.data and the state of tf.nn.dynamic_rnn",
}


class NameTables(NamedTuple):
    """Tables of the old names that the user's files get.

    Attributes:
      modules: old module -> the module that replaces it.
      names: "old.module.attribute" -> "module:attribute", the replacement.
      versions: full name of a version constant -> its value, such as "tensorflow.__version__" -> "1.15.0".
      same: other name of a module -> the module's name in these tables.
      roots: packages that get these names; other packages are used as installed.
      effects: package -> "module:function", called when the user's files import the package.
    """

    modules: dict[str, str]
    names: dict[str, str]
    versions: dict[str, str]
    same: dict[str, str]
    roots: frozenset[str] = frozenset({"tensorflow", "keras"})
    effects: dict[str, str] = {}


_OTHER_NAMES = (
    "tensorflow.compat.v1", "tensorflow._api.v1", "tensorflow_core", "npu_bridge.npu_init.tf", "keras.backend.tf",
    "keras.backend.tensorflow_backend.tf",
)  # fmt: skip
OF_1 = NameTables(
    MODULES,
    {**NAMES, **OLD_OPTIMIZERS},
    {
        "keras.__version__": "2.3.1",
        "tensorflow.VERSION": "1.15.0",
        "tensorflow.__version__": "1.15.0",
        "tensorflow.keras.__version__": "2.2.4-tf",
        "tensorflow.version.VERSION": "1.15.0",
    },
    dict.fromkeys(_OTHER_NAMES, "tensorflow"),
    effects={
        "keras": "tensorflow1_compat.old_keras_rules:restore_standalone_keras",
        "numpy": "tensorflow1_compat.old_python.old_numpy_rules:draw_ragged_rows",
    },
)
