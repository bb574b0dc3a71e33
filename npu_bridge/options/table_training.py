"""Options of the training loop, of checkpoints and summaries, and of work shared between ranks."""

from __future__ import annotations

import functools

from npu_bridge.options.grammar import parse_accelerate_train_mode
from npu_bridge.options.kinds import Boolean, Directory, HelperObject, Integer, Number, Seed, TensorFlowObject, Text
from npu_bridge.options.table import (
    DUMP,
    DYNAMIC_INPUT,
    EXPERIMENTAL,
    GRAPH_MEMORY,
    MEMORY,
    PROFILING,
    Option,
    recorded,
    works,
)

_BASE = works("As in tf.estimator.RunConfig.")
_RANK_0 = "Only rank 0 writes."
_BASE_STRATEGY = works("As in tf.estimator.RunConfig, within one rank. The optimizer averages across ranks.")
_STRATEGY = TensorFlowObject(("distribute.Strategy", "compat.v1.distribute.Strategy"))
_AUTO_OR_MANUAL = Text(("auto", "manual"), wrong_type=ValueError)
_experimental = functools.partial(Option, owner=EXPERIMENTAL)
_graph_memory = functools.partial(Option, owner=GRAPH_MEMORY)
_undocumented = functools.partial(Option, status="undocumented")


def _helper_option(position: int, name: str, owner: str, doc: str, effect=works) -> Option:
    return Option(
        position, name, HelperObject(owner), doc, effect(f"Each field has its own line under {owner}."), key=None
    )


OPTIONS = (
    Option(
        1,
        "iterations_per_loop",
        Integer(1),
        "Number of training steps in one session.run.",
        works(
            "Fetches and hooks see the last step of a loop. Only whole loops run, so training may end up to one loop "
            "late. NPUEstimator sets the loop up. Elsewhere, use util.set_iteration_per_loop or SetIterationsVarHook."
        ),
        default=1,
        attribute="iterations_per_loop",
    ),
    _helper_option(2, "profiling_config", PROFILING, "Settings of the profiler."),
    Option(3, "model_dir", Directory(), "Directory of checkpoints and summaries.", _BASE),
    Option(4, "tf_random_seed", Seed(), "Seed of the graph.", _BASE),
    Option(
        5,
        "save_summary_steps",
        Number(whole=True),
        "Number of steps between summaries. 0 writes no summaries.",
        works(_RANK_0),
        default=0,
        accepts_none=True,
    ),
    Option(
        6,
        "save_checkpoints_steps",
        Number(whole=True),
        "Number of steps between checkpoints. 0 saves no checkpoints. If neither steps nor seconds are set: 100.",
        works(_RANK_0),
        absent=100,
    ),
    Option(
        7,
        "save_checkpoints_secs",
        Number(),
        "Seconds between checkpoints. Cannot be combined with save_checkpoints_steps. Not for multi-rank training.",
        works(_RANK_0),
    ),
    Option(
        8,
        "session_config",
        TensorFlowObject(("compat.v1.ConfigProto",)),
        "Settings of the session. Options in its NpuOptimizer entry count as well; NPURunConfig overrides them.",
        works("A copy is used. The object itself is not modified."),
    ),
    Option(
        9,
        "keep_checkpoint_max",
        Number(whole=True),
        "Maximum number of recent checkpoints to keep. 0 or None keeps all.",
        _BASE,
        default=5,
        accepts_none=True,
    ),
    Option(
        10,
        "keep_checkpoint_every_n_hours",
        Number(above_zero=True),
        "Keep one checkpoint permanently every so many hours.",
        _BASE,
        default=10000,
        accepts_none=True,
    ),
    Option(
        11,
        "log_step_count_steps",
        Number(above_zero=True, whole=True),
        "Number of steps between log lines with the loss and the steps per second.",
        works(_RANK_0),
        default=100,
        accepts_none=True,
    ),
    Option(
        12,
        "distribute",
        TensorFlowObject(("compat.v1.distribute.experimental.ParameterServerStrategy",)),
        "Parameter-server strategy. Needs a cluster in TF_CONFIG and mix_compile_mode=True.",
        works("Passed to tf.estimator.RunConfig for training and evaluation."),
        attribute="_experimental_distribute",
    ),
    Option(
        13,
        "enable_data_pre_proc",
        Boolean(),
        "Run the dataset's GetNext on the device.",
        recorded("tf.data feeds the device."),
        default=True,
        attribute="enable_data_pre_proc",
        status="deprecated",
        absent=False,
    ),
    Option(
        17,
        "mix_compile_mode",
        Boolean(only_bool=True),
        "Run operators without a device kernel in TensorFlow. Needs iterations_per_loop=1.",
        recorded("Every operator runs in TensorFlow."),
        default=False,
        attribute="mix_compile_mode",
    ),
    Option(
        18,
        "hcom_parallel",
        Boolean(),
        "Overlap gradient all-reduce with the backward pass.",
        works(
            "False delays every all-reduce until all gradients are computed. It takes effect in NPUEstimator, and in "
            "any graph whose session exists before the optimizer."
        ),
        default=True,
    ),
    _helper_option(21, "dump_config", DUMP, "Tensor dumps and overflow detection."),
    Option(
        23,
        "is_tailing_optimization",
        Boolean(),
        "Overlap the last all-reduce with work that does not depend on it. Set the same value in NPUOptimizer.",
        works(
            "The parameter of NPUOptimizer decides; a different value here draws a warning. With other loss-scale "
            "optimizers, this option alone is enough."
        ),
        default=False,
        attribute="is_tailing_optimization",
    ),
    _undocumented(
        24,
        "horovod_mode",
        Boolean(only_bool=True, wrong_type=ValueError),
        "The script broadcasts the initial variables itself.",
        works("True: NPUEstimator does not broadcast."),
        default=False,
        attribute="horovod_mode",
        key=None,
    ),
    Option(
        25,
        "graph_run_mode",
        Integer(0, 1),
        "Use of the graph. 0: online inference. 1: training.",
        recorded("The Estimator's mode decides."),
        default=1,
        attribute="graph_run_mode",
    ),
    _helper_option(31, "dynamic_input_config", DYNAMIC_INPUT, "Shape profiles of dynamic inputs.", recorded),
    _undocumented(
        42,
        "hcom_multi_mode",
        Boolean(),
        "Selects the communication mode.",
        recorded("Communication is Horovod's."),
        default=False,
    ),
    Option(46, "train_distribute", _STRATEGY, "Strategy for training.", _BASE_STRATEGY, status="unsupported"),
    Option(47, "eval_distribute", _STRATEGY, "Strategy for evaluation.", _BASE_STRATEGY, status="unsupported"),
    Option(
        56,
        "hccl_timeout",
        Integer(0, 2147483647, enforced=False),
        "Timeout of a collective in seconds. 0: no timeout.",
        recorded("Horovod's own timeouts apply."),
        variable="HCCL_EXEC_TIMEOUT",
    ),
    _undocumented(
        59, "HCCL_algorithm", Text(), "Algorithm of collective communication.", recorded("Communication is Horovod's.")
    ),
    _helper_option(62, "memory_config", MEMORY, "Memory management settings.", recorded),
    _helper_option(63, "experimental_config", EXPERIMENTAL, "Experimental settings."),
    _experimental(
        1,
        "logical_device_cluster_deploy_mode",
        Text(("LB", "SINGLE"), enforced=False),
        "Placement of models on a cluster of devices.",
        default="LB",
        key="experimental_logical_device_cluster_deploy_mode",
        accepts_none=True,
        sent_without_helper=True,
        status="undocumented",
    ),
    *(
        _experimental(position, name, Text(), doc, key=f"experimental_{name}", status="undocumented")
        for position, name, doc in (
            (2, "logical_device_id", "Logical device to use in deployment mode SINGLE."),
            (3, "model_deploy_mode", "Deployment mode of a model."),
            (4, "model_deploy_devicelist", "Devices to deploy a model to."),
        )
    ),
    _experimental(
        5,
        "graph_memory_optimize_config",
        HelperObject(GRAPH_MEMORY),
        "Recomputation and graph slicing.",
        recorded(f"Each field has its own line under {GRAPH_MEMORY}."),
        key=None,
        status="undocumented",
    ),
    _experimental(
        6,
        "enable_graph_parallel",
        Boolean(),
        "Partition the graph across devices.",
        absent=False,
        status="undocumented",
    ),
    _experimental(
        7, "graph_parallel_option_path", Text(), "File with graph-parallelism options.", status="undocumented"
    ),
    _experimental(
        8,
        "graph_compiler_cache_dir",
        Text(says="an existing directory"),
        "Cache directory for compiled graphs.",
        recorded("The directory must exist. Nothing is written to it."),
    ),
    _experimental(9, "resource_config_path", Text(), "Resource description file.", status="undocumented"),
    _experimental(
        10,
        "accelerate_train_mode",
        Text(
            parse=parse_accelerate_train_mode, says="fast|step, fast|step|0.2..0.9, fast|loss|1.01..1.5, or fast1|..."
        ),
        "Train in float16 (fast) or bfloat16 (fast1) first, then switch to the configured precision.",
        works("The live session switches once. Evaluation and prediction keep the configured precision."),
        key="experimental_accelerate_train_mode",
    ),
    _graph_memory(
        1,
        "recompute",
        _AUTO_OR_MANUAL,
        "Recompute activations during the backward pass.",
        key=None,
        status="undocumented",
    ),
    _graph_memory(2, "graph_slice", _AUTO_OR_MANUAL, "Slice the graph to save memory.", status="undocumented"),
)
