"""Options of the training loop, of checkpoints and summaries, and of work shared between ranks."""

from __future__ import annotations

import functools

from npu_bridge.options.grammar import parse_accelerate_train_mode
from npu_bridge.options.kinds import Boolean, Directory, Helper, Integer, Number, Seed, TensorFlowObject, Text
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
_RANK_0 = "Ranks above 0 do not write: there the property reads"
_BASE_STRATEGY = works("As in tf.estimator.RunConfig, within one rank; an optimizer averages over the ranks.")
_STRATEGY = TensorFlowObject(("distribute.Strategy", "compat.v1.distribute.Strategy"))
_AUTO_OR_MANUAL = Text(("auto", "manual"), wrong_type=ValueError)
_experimental = functools.partial(Option, owner=EXPERIMENTAL)
_graph_memory = functools.partial(Option, owner=GRAPH_MEMORY)
_undocumented = functools.partial(Option, status="undocumented")


def _helper(position: int, name: str, owner: str, doc: str, effect=works) -> Option:
    return Option(position, name, Helper(owner), doc, effect(f"Each field has its own line under {owner}."), key=None)


OPTIONS = (
    Option(
        1,
        "iterations_per_loop",
        Integer(1),
        "Training steps executed by one session.run.",
        works(
            "Fetched values and hooks are of the last step; whole loops only, so training may end up to a loop later. "
            "NPUEstimator names the step; elsewhere util.set_iteration_per_loop or SetIterationsVarHook does."
        ),
        default=1,
        attribute="iterations_per_loop",
    ),
    _helper(2, "profiling_config", PROFILING, "Profiling switch and options."),
    Option(3, "model_dir", Directory(), "Directory of checkpoints and summaries.", _BASE),
    Option(4, "tf_random_seed", Seed(), "Seed of the graph.", _BASE),
    Option(
        5,
        "save_summary_steps",
        Number(whole=True),
        "Steps between summaries; 0 writes none.",
        works(f"{_RANK_0} 0."),
        default=0,
        accepts_none=True,
    ),
    Option(
        6,
        "save_checkpoints_steps",
        Number(whole=True),
        "Steps between checkpoints; 0 writes none; 100 when neither steps nor seconds are given.",
        works(f"{_RANK_0} None."),
        absent=100,
    ),
    Option(
        7,
        "save_checkpoints_secs",
        Number(),
        "Seconds between checkpoints; not meant for several ranks; excludes save_checkpoints_steps.",
        works(f"{_RANK_0} None."),
    ),
    Option(
        8,
        "session_config",
        TensorFlowObject(("compat.v1.ConfigProto",)),
        "Session settings; an NpuOptimizer entry in it is read too, and this object wins over it.",
        works("Never changed in place."),
    ),
    Option(
        9,
        "keep_checkpoint_max",
        Number(whole=True),
        "Checkpoints kept; 0 or None keeps all.",
        _BASE,
        default=5,
        accepts_none=True,
    ),
    Option(
        10,
        "keep_checkpoint_every_n_hours",
        Number(above_zero=True),
        "Hours between checkpoints that are never deleted.",
        _BASE,
        default=10000,
        accepts_none=True,
    ),
    Option(
        11,
        "log_step_count_steps",
        Number(above_zero=True, whole=True),
        "Steps between log lines with loss and steps per second.",
        works(f"{_RANK_0} None."),
        default=100,
        accepts_none=True,
    ),
    Option(
        12,
        "distribute",
        TensorFlowObject(("compat.v1.distribute.experimental.ParameterServerStrategy",)),
        "Parameter-server strategy, together with a cluster in TF_CONFIG and mix_compile_mode=True.",
        works("Passed to tf.estimator.RunConfig for training and evaluation."),
        attribute="_experimental_distribute",
    ),
    Option(
        13,
        "enable_data_pre_proc",
        Boolean(),
        "Move the dataset's GetNext to the device.",
        recorded("tf.data already feeds the device."),
        default=True,
        attribute="enable_data_pre_proc",
        status="deprecated",
        absent=False,
    ),
    Option(
        17,
        "mix_compile_mode",
        Boolean(only_bool=True),
        "Let operators without a kernel on the device run in TensorFlow; needs iterations_per_loop=1.",
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
            "False starts no all-reduce before all gradients exist. NPUEstimator's model function knows it, and "
            "any graph whose session is made before the optimizer."
        ),
        default=True,
    ),
    _helper(21, "dump_config", DUMP, "What to dump of the tensors of chosen steps, and overflow detection."),
    Option(
        23,
        "is_tailing_optimization",
        Boolean(),
        "Overlap the last all-reduce with work that does not need it; same value as in NPUOptimizer.",
        works(
            "NPUOptimizer's own parameter decides; a different value there is a warning. Graphs of other loss-scale "
            "optimizers need only this one."
        ),
        default=False,
        attribute="is_tailing_optimization",
    ),
    _undocumented(
        24,
        "horovod_mode",
        Boolean(only_bool=True, wrong_type=ValueError),
        "The script broadcasts the initial variables itself.",
        works("NPUEstimator then leaves the broadcast to the script."),
        default=False,
        attribute="horovod_mode",
        key=None,
    ),
    Option(
        25,
        "graph_run_mode",
        Integer(0, 1),
        "Purpose of the graph: 0 online inference, 1 training.",
        recorded("The Estimator's mode decides."),
        default=1,
        attribute="graph_run_mode",
    ),
    _helper(31, "dynamic_input_config", DYNAMIC_INPUT, "Profiles of inputs with dynamic dimensions.", recorded),
    _undocumented(
        42,
        "hcom_multi_mode",
        Boolean(),
        "Communication mode switch.",
        recorded("Communication is Horovod's."),
        default=False,
    ),
    Option(46, "train_distribute", _STRATEGY, "Strategy for training.", _BASE_STRATEGY, status="unsupported"),
    Option(47, "eval_distribute", _STRATEGY, "Strategy for evaluation.", _BASE_STRATEGY, status="unsupported"),
    Option(
        56,
        "hccl_timeout",
        Integer(0, 2147483647, enforced=False),
        "Seconds a collective may take; 0 waits for ever.",
        recorded("Horovod's own limits apply."),
        variable="HCCL_EXEC_TIMEOUT",
    ),
    _undocumented(
        59, "HCCL_algorithm", Text(), "Algorithm of the collectives.", recorded("Communication is Horovod's.")
    ),
    _helper(62, "memory_config", MEMORY, "Memory policies.", recorded),
    _helper(63, "experimental_config", EXPERIMENTAL, "Experimental switches."),
    _experimental(
        1,
        "logical_device_cluster_deploy_mode",
        Text(("LB", "SINGLE"), enforced=False),
        "How models are placed on a cluster of devices.",
        default="LB",
        key="experimental_logical_device_cluster_deploy_mode",
        accepts_none=True,
        sent_without_helper=True,
        status="undocumented",
    ),
    *(
        _experimental(position, name, Text(), doc, key=f"experimental_{name}", status="undocumented")
        for position, name, doc in (
            (2, "logical_device_id", "Logical device for deployment mode SINGLE."),
            (3, "model_deploy_mode", "How a model is deployed."),
            (4, "model_deploy_devicelist", "Devices a model is deployed to."),
        )
    ),
    _experimental(
        5,
        "graph_memory_optimize_config",
        Helper(GRAPH_MEMORY),
        "Recomputation and slicing of the graph.",
        recorded(f"Each field has its own line under {GRAPH_MEMORY}."),
        key=None,
        status="undocumented",
    ),
    _experimental(
        6, "enable_graph_parallel", Boolean(), "Split the graph over devices.", absent=False, status="undocumented"
    ),
    _experimental(
        7, "graph_parallel_option_path", Text(), "File with options of graph parallelism.", status="undocumented"
    ),
    _experimental(
        8,
        "graph_compiler_cache_dir",
        Text(says="an existing directory"),
        "Directory where compiled graphs are kept.",
        recorded("The directory must exist; nothing is written to it."),
    ),
    _experimental(9, "resource_config_path", Text(), "File describing the resources.", status="undocumented"),
    _experimental(
        10,
        "accelerate_train_mode",
        Text(
            parse=parse_accelerate_train_mode, says="fast|step, fast|step|0.2..0.9, fast|loss|1.01..1.5, or fast1|..."
        ),
        "Train the first part in float16 (fast) or bfloat16 (fast1), the rest in the configured precision.",
        works("One switch in the live session; evaluation and prediction are never accelerated."),
        key="experimental_accelerate_train_mode",
    ),
    _graph_memory(
        1, "recompute", _AUTO_OR_MANUAL, "Recompute activations in the backward pass.", key=None, status="undocumented"
    ),
    _graph_memory(2, "graph_slice", _AUTO_OR_MANUAL, "Slice the graph to save memory.", status="undocumented"),
)
