"""Names of the NPU interface for TensorFlow 1.15, behind which nothing is wrapped: scripts for NPUs start with them.

`install()` makes every `npu_bridge.<anything>` importable; each such module has all of these names. It is for replays
of recorded trainings, where only the mathematics of the script itself counts: loss scales are 1, there is one rank.
"""

import contextlib
import importlib.abc
import importlib.machinery
import math
import os
import sys
import types

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.training import session_run_hook

PACKAGES = ("npu_bridge", "npu_device", "hccl")
_ZERO = ("RANK_ID", "DEVICE_ID", "ASCEND_DEVICE_ID", "DEVICE_INDEX")
VARIABLES = {"RANK_SIZE": "1", **dict.fromkeys(_ZERO, "0"), "JOB_ID": "10087"}  # a launcher's, of one rank


class Anything:
    """A configuration, a profiler, a history: takes all arguments and does nothing; what it is asked for is 0."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return number(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


class EmptyHook(tf.train.SessionRunHook):
    """Takes all arguments and does nothing."""

    def __init__(self, *_, **__):
        pass


class OutputHook(tf.train.LoggingTensorHook):
    """Scripts pass it no more than tensors."""

    def __init__(self, tensors=None, *_, **__):
        super().__init__(tensors or {}, every_n_iter=10**9)


class FixedScale:
    """A loss scale of 1, whatever it is made of; hooks of scripts fetch it by its name."""

    def __init__(self, *_, **__):
        self._scale = tf.constant(1.0, name="loss_scale")

    def get_loss_scale(self):
        """A scalar."""
        return self._scale

    def update_loss_scale(self, *_):
        """Nothing to do."""
        return tf.no_op()


def inner(optimizer, *_, **__):
    """An optimizer as it is."""
    return optimizer


def loss_scaled(optimizer, *_, **__):
    """An optimizer that updates nothing before it has all gradients, as one that asks whether they are finite.

    Hooks of scripts fetch the tensor beside it by its name: no step overflows.
    """
    apply = optimizer.apply_gradients

    def applied(grads_and_vars, *given, **named):
        tf.constant(True, name="overflow_status_reduce_all")
        grads_and_vars = list(grads_and_vars)
        with tf.control_dependencies([gradient for gradient, _ in grads_and_vars if gradient is not None]):
            return apply(grads_and_vars, *given, **named)

    optimizer.apply_gradients = applied
    return optimizer


def first(value=None, *_, **__):
    """The argument as it is."""
    return value


def nothing(*_, **__):
    """Does nothing."""


def config_proto(config_proto=None, *_, **__):
    """A session's settings, with the entry that scripts write options into."""
    config = config_proto or tf.ConfigProto()
    entries = config.graph_options.rewrite_options.custom_optimizers
    if "NpuOptimizer" not in [entry.name for entry in entries]:
        entries.add().name = "NpuOptimizer"
    return config


def run_config(run_config=None, *_, **__):
    """A RunConfig."""
    return run_config or tf.estimator.RunConfig()


def hooks_append(hooks_list=None, *_, **__):
    """Hooks as they are."""
    return hooks_list or []


def own_run_config(model_dir=None, **others):
    """The RunConfig that an NPURunConfig is beside its own options."""
    stock = tf.estimator.RunConfig.__init__.__code__.co_varnames
    known = {name: value for name, value in others.items() if name in stock and name != "train_distribute"}
    if "save_checkpoints_steps" in known and known["save_checkpoints_steps"] is None:
        known.pop("save_checkpoints_steps")
    return tf.estimator.RunConfig(model_dir=model_dir, **known)


class Estimator(tf.estimator.Estimator):
    """Ignores what only NPUEstimator takes."""

    def __init__(self, model_fn=None, model_dir=None, config=None, params=None, warm_start_from=None, **_):
        super().__init__(model_fn, model_dir, config, params, warm_start_from)


def estimator_spec(mode, host_call=None, scaffold_fn=None, **fields):
    """An EstimatorSpec."""
    del host_call, scaffold_fn
    return tf.estimator.EstimatorSpec(mode, **fields)


def dropout(x, keep_prob, noise_shape=None, seed=None, name=None, **_):
    """As on an NPU: 1.0 keeps x itself."""
    if isinstance(keep_prob, float) and keep_prob == 1.0:
        return x
    return tf.nn.dropout(x, rate=1 - keep_prob, noise_shape=noise_shape, seed=seed, name=name)


def random_choice(x, count, seed=0, seed2=0):
    """Places where a boolean tensor is True, and which rows are; what is drawn has the name that it has in a record."""
    places = tf.cast(tf.where(tf.cast(x, tf.bool)), tf.int32)
    found = tf.shape(places)[0]
    drawn = tf.raw_ops.RandomUniform(shape=found[tf.newaxis], dtype=tf.float32, seed=seed, seed2=seed2)
    shuffled = tf.gather(places, tf.argsort(drawn))
    rows = count or found
    taken = tf.minimum(found, rows)
    chosen = tf.pad(shuffled[:taken], [[0, rows - taken], [0, 0]])
    chosen.set_shape([count or None, None])
    return chosen, tf.range(rows) < taken


def gelu(x):
    """The approximation by tanh."""
    return 0.5 * x * (1.0 + tf.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * tf.pow(x, 3))))


class DynamicRNN(tf.keras.layers.Layer):
    """An LSTM in one direction over all steps, whose gates are i, j, f and o; it gives y, h, c, them and tanh(c)."""

    def __init__(self, hidden_size, dtype, *_, forget_bias=0.0, **__):
        super().__init__(name="dynamicrnn", dtype=dtype)
        self._width, self._forget_bias = hidden_size, forget_bias

    def build(self, shape):
        self._w = self.add_weight("w", [int(shape[2]) + self._width, 4 * self._width])
        self._b = self.add_weight("b", [4 * self._width])
        super().build(shape)

    def call(self, x):
        def step(before, now):
            i, j, f, o = tf.split(tf.matmul(tf.concat([now, before[0]], 1), self._w) + self._b, 4, axis=1)
            i, j, f, o = tf.sigmoid(i), tf.tanh(j), tf.sigmoid(f + self._forget_bias), tf.sigmoid(o)
            c = f * before[1] + i * j
            return o * tf.tanh(c), c, i, j, f, o, tf.tanh(c)

        h, *others = tf.scan(step, x, (tf.zeros([tf.shape(x)[1], self._width]),) * 7)
        return [h, h, *others]


class DynamicGRUV2(tf.keras.layers.Layer):
    """A GRU in one direction whose gates are update, reset and new; it gives y, h, these and the hidden part of new."""

    def __init__(self, hidden_size, dtype, *_, **__):
        super().__init__(name=type(self).__name__.lower(), dtype=dtype)
        self._width = hidden_size

    def build(self, shape):
        shape, width = (shape[0] if isinstance(shape, list) else shape), 3 * self._width
        self._weights_of_x = self.add_weight("weight_input", [int(shape[2]), width])
        self._weights_of_h = self.add_weight("weight_hidden", [self._width, width])
        self._biases = [self.add_weight(name, [width]) for name in ("bias_input", "bias_hidden")]
        super().build(shape)

    def call(self, x, seq_length=None):
        return self._run(x, seq_length)

    def _run(self, x, lengths, attention=None):
        steps, batch = tf.unstack(tf.shape(x)[:2])
        lengths = tf.fill([batch], steps) if lengths is None else lengths

        def step(before, now):
            count, x, attention = now
            of_x = tf.split(tf.matmul(x, self._weights_of_x) + self._biases[0], 3, axis=1)
            of_h = tf.split(tf.matmul(before[1], self._weights_of_h) + self._biases[1], 3, axis=1)
            update, reset = tf.sigmoid(of_x[0] + of_h[0]), tf.sigmoid(of_x[1] + of_h[1])
            new, weakened = tf.tanh(of_x[2] + reset * of_h[2]), (1 - attention)[:, None] * update
            h = (1 - weakened) * new + weakened * before[1]
            is_there, nothing = count < lengths, tf.zeros_like(h)
            gates = [tf.where(is_there, each, nothing) for each in (h, update, weakened, reset, new, of_h[2])]
            return (gates[0], tf.where(is_there, h, before[1]), *gates[1:])

        elements = (tf.range(steps), x, tf.zeros([steps, batch]) if attention is None else attention)
        y, h, update, weakened, *others = tf.scan(step, elements, (tf.zeros([batch, self._width]),) * 7)
        return [y, h, update, *([] if attention is None else [weakened]), *others]


class DynamicAUGRU(DynamicGRUV2):
    """A GRU whose update gate is multiplied by 1 - attention; this comes after the update gate."""

    def call(self, x, weight_att, seq_length=None):
        return self._run(x, seq_length, weight_att)


def operation(*_, **__):
    """An operation that does nothing."""
    return tf.no_op()


@contextlib.contextmanager
def scope(*_, **__):
    """Nothing is kept in it."""
    yield


def session_of_keras(config=None, *_, **__):
    """Makes Keras use a session of these settings."""
    session = tf.Session(config=config)
    tf.keras.backend.set_session(session)
    return session


def close_session(session, *_, **__):
    """Closes it."""
    session.close()


class IterationPerLoop:
    """One step in a run."""

    def create_iteration_per_loop_var(self, train_op):
        """The step as it is."""
        return train_op

    def load_iteration_per_loop_var(self, *_, **__):
        """Nothing to load."""


def module(name, **names):
    """A module with some names."""
    made = types.ModuleType(name)
    made.__dict__.update(names)
    return made


def number(value):
    """A function that gives it."""
    return lambda *_, **__: value


util = module(
    "util", set_iteration_per_loop=lambda session, train_op, *_, **__: train_op, IterationPerLoop=IterationPerLoop,
    keras_to_npu=first, set_graph_exec_config=first, set_op_max_shape=nothing, set_op_tensor_max_size=nothing,
)  # fmt: skip
scopes = module(
    "npu_scope", keep_dtype_scope=scope, without_npu_compile_scope=scope, keep_tensors_dtypes=nothing,
    npu_weight_prefetch_scope=scope, disable_autofuse=scope,
)  # fmt: skip
_OPTIMIZERS = "NPUOptimizer NPUDistributedOptimizer NPULossScaleOptimizer KerasDistributeOptimizer npu_keras_optimizer"
_OPTIMIZERS += " npu_tf_optimizer npu_distributed_optimizer_wrapper"
_OBJECTS = "DumpConfig DynamicInputConfig ProfilingConfig MemoryConfig ExperimentalConfig"
_HOOKS = "NPUBroadcastGlobalVariablesHook NPUCheckpointSaverHook NpuEmptyHook SetIterationsVarHook TellMeStepOrLossHook"
_NOTHING = "shutdown_resource create_group destroy_group set_split_strategy_by_idx npu_clear_session"
_NOTHING += " set_split_strategy_by_size npu_global_init"
_MODULES = "npu_config npu_optimizer npu_loss_scale_manager npu_loss_scale_optimizer npu_estimator npu_hook npu_plugin"
_MODULES += " npu_strategy npu_cpu_ops npu_rnn npu_callbacks experimental_options profiler scoped_graph_manager backend"
STAR = {
    **dict.fromkeys(_OPTIMIZERS.split(), inner),
    "NPULossScaleOptimizer": loss_scaled,
    **dict.fromkeys(_OBJECTS.split(), Anything),
    **dict.fromkeys(_HOOKS.split(), EmptyHook),
    **dict.fromkeys(_NOTHING.split(), nothing),
    "init_resource": number((None, None)),
    **{f"get_{kind}rank_{of}": number(of == "size") for kind in ("", "local_", "npu_") for of in ("size", "id")},
    "NPUBroadcastGlobalVariablesCallback": tf.keras.callbacks.Callback,
    "ExponentialUpdateLossScaleManager": FixedScale,
    "FixedLossScaleManager": FixedScale,
    "NPUOutputTensorHook": OutputHook,
    "NPURunConfig": own_run_config,
    "NPUEstimator": Estimator,
    "NPUEstimatorSpec": estimator_spec,
    "npu_config_proto": config_proto,
    "npu_run_config_init": run_config,
    "npu_hooks_append": hooks_append,
    "npu_callbacks_append": lambda callbacks_list=None, *_, **__: callbacks_list or [],
    "npu_graph_options": lambda graph_options=None, *_, **__: graph_options or tf.GraphOptions(),
    "npu_optimizer_options": lambda optimizer_options=None, *_, **__: optimizer_options or tf.OptimizerOptions(),
    "npu_allreduce": first,
    "keras_to_npu": first,
    "set_keras_session_npu_config": session_of_keras,
    "close_session": close_session,
    "hccl_ops": module("hccl_ops", allreduce=first, broadcast=lambda tensors, *_, **__: tensors, allgather=first),
    "npu_ops": module(
        "npu_ops", dropout=dropout, npu_onnx_graph_op=first, initialize_system=operation, shutdown_system=operation
    ),
    "npu_unary_ops": module("npu_unary_ops", gelu=gelu),
    "npu_scope": scopes,
    "util": util,
    "os": os,
    "tf": tf,
    "config_pb2": config_pb2,
    "rewriter_config_pb2": rewriter_config_pb2,
    "RewriterConfig": RewriterConfig,
    "session_run_hook": session_run_hook,
}
MORE = {
    "DynamicRNN": DynamicRNN,
    "DynamicGRUV2": DynamicGRUV2,
    "DynamicAUGRU": DynamicAUGRU,
    "History": Anything,
    "INK": "",
    "QUIET": "",
    "tidy": nothing,
    "HistoryHook": EmptyHook,
    "ProgressHook": EmptyHook,
    "format_summary": nothing,
    "summarize": nothing,
    "smooth": first,
    "dropout": dropout,
    "gelu": gelu,
    "randomchoicewithmask": random_choice,
    "IterationPerLoop": IterationPerLoop,
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        del path, target
        if name.partition(".")[0] not in PACKAGES or not name.islower():
            return None  # a missing class is not a module
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        made = types.ModuleType(spec.name)
        made.__dict__.update({**MORE, **STAR, "__all__": [*STAR]})
        own = STAR.get(spec.name.rpartition(".")[2])
        if isinstance(own, types.ModuleType):
            made.__dict__.update(own.__dict__, __name__=spec.name)
        return made

    def exec_module(self, module):
        for name in _MODULES.split():
            module.__dict__.setdefault(name, types.SimpleNamespace(**MORE, **STAR))


def install():
    """From now on scripts of this process find `npu_bridge` and its like here, and get their rank."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    sys.meta_path.insert(0, _Finder())
