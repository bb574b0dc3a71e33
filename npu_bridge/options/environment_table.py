"""Lists the documented environment variables: their meaning on the NPU stack and their effect here."""

from __future__ import annotations

from typing import NamedTuple

from npu_bridge.base.environment import read_variable
from npu_bridge.options.table import Effect, recorded, works


class EnvironmentVariable(NamedTuple):
    """One environment variable.

    Attributes:
      name: the variable.
      doc: its meaning on the NPU stack.
      effect: its effect here.
      is_documented: whether the NPU stack documents it; the stack also reads variables that it does not document.
    """

    name: str
    doc: str
    effect: Effect
    is_documented: bool = True

    @property
    def value(self) -> str | None:
        """The current value in the environment; None if the variable is unset or empty."""
        return read_variable(self.name)


_OTHER_PRODUCT = recorded("Belongs to the adapter for TensorFlow 2.")
_COMMUNICATION = recorded("Communication is Horovod's.")
_NO_DEVICE = recorded("No NPU is driven.")
_NO_DUMP = recorded("Nothing is dumped.")
_PROGRESS = works("Read before every training run with accelerate_train_mode.")
_FALLBACK = recorded("Read if the option is not set, and recorded like it.")

_DOCUMENTED = (
    ("JOB_ID", "Name of the task.", works("Set if it is missing, for scripts that read it.")),
    (
        "ASCEND_DEVICE_ID",
        "Device of this process.",
        works("Set from the launcher's local rank if it is missing. Chooses the GPU like session_device_id."),
    ),
    ("RANK_ID", "Rank of this process.", works("Set from the launcher's rank if missing. Another rank is an error.")),
    (
        "RANK_SIZE",
        "Number of ranks.",
        works("Set from the launcher. A different number is an error, except 1 under npu-run."),
    ),
    ("RANK_TABLE_FILE", "JSON file describing the cluster.", works("Its device_id chooses the GPU.")),
    ("CM_CHIEF_IP", "Address the chief listens on.", _COMMUNICATION),
    ("CM_CHIEF_PORT", "Port the chief listens on.", _COMMUNICATION),
    ("CM_CHIEF_DEVICE", "Device of the chief.", _COMMUNICATION),
    ("CM_WORKER_SIZE", "Number of ranks.", works("Used instead of RANK_SIZE. Both together are an error.")),
    ("CM_WORKER_IP", "Address of this host towards the chief.", _COMMUNICATION),
    ("STEP_NOW", "Step reached so far.", _PROGRESS),
    ("TOTAL_STEP", "Steps of the whole training.", _PROGRESS),
    ("LOSS_NOW", "Loss reached so far.", _PROGRESS),
    ("TARGET_LOSS", "Loss the training aims at.", _PROGRESS),
    (
        "ENABLE_FORCE_V2_CONTROL",
        "1: convert control flow for dynamic shapes.",
        recorded("TensorFlow runs control flow unchanged."),
    ),
    (
        "ENABLE_HF32_EXECUTION",
        "Allows float32 with an 11-bit mantissa.",
        works("1 or 0: allows TF32 on GPUs or not, in sessions and under npu_device. Unset: TensorFlow's default."),
    ),
    ("NPU_DEBUG", "Debug log.", _OTHER_PRODUCT),
    ("NPU_DUMP_GRAPH", "Graph dump.", _OTHER_PRODUCT),
    ("NPU_ENABLE_PERF", "Timing print.", _OTHER_PRODUCT),
    ("NPU_LOOP_SIZE", "Loop size; not iterations_per_loop.", _OTHER_PRODUCT),
)
_OTHERS = (
    ("TF_CONFIG", "Cluster and task of this process.", works("tf.estimator reads it, and NPURunConfig checks it.")),
    ("DEVICE_ID", "Old name of the device.", works("Set like ASCEND_DEVICE_ID.")),
    (
        "DEVICE_INDEX",
        "Number of the device in the cluster.",
        works("Set from the launcher's rank if it is missing, and always on several ranks."),
    ),
    ("AOE_MODE", "Value of aoe_mode if that is not set.", _FALLBACK),
    (
        "PROFILING_MODE",
        "true: profile the run, if the configuration does not say.",
        works("Read if the option is not set."),
    ),
    ("PROFILING_OPTIONS", "The profiling_options for this profile.", works("Read if the option is not set.")),
    (
        "HCCL_CONNECT_TIMEOUT",
        "Seconds that ranks wait for each other, for example in create_group. Default: 120.",
        works(),
    ),
    ("HCCL_EXEC_TIMEOUT", "Value of hccl_timeout if that is not set.", _FALLBACK),
    ("POD_NAME", "Identity of this process in old rank tables.", recorded("The reader of rank tables uses it.")),
    ("HEARTBEAT", "Heartbeat of the task.", _NO_DEVICE),
    (
        "LOCAL_CHECKPOINT_DIR",
        "Checkpoint to start from.",
        works("NPUEstimator reads it if there is neither warm_start_from nor a job_start_file."),
    ),
    (
        "RESTORE_FROM",
        "Checkpoint to start from, as a last resort.",
        works("NPUEstimator reads it if nothing else names a checkpoint."),
    ),
    ("HCCL_SOCKET_FAMILY", "Family of network addresses.", _COMMUNICATION),
    ("HCCL_NPU_SOCKET_PORT_RANGE", "Ports of several processes on a device.", _COMMUNICATION),
    ("ASCEND_WORK_PATH", "Root of files of one process.", _NO_DEVICE),
    ("ASCEND_CACHE_PATH", "Root of shared files.", _NO_DEVICE),
    ("ASCEND_MAX_OP_CACHE_SIZE", "Size limit of the kernel cache.", _NO_DEVICE),
    ("ASCEND_REMAIN_CACHE_SIZE_RATIO", "Share of the kernel cache to keep.", _NO_DEVICE),
    ("NPU_COLLECT_PATH", "Collect graphs and dumps of failures here.", _NO_DUMP),
    ("DUMP_GE_GRAPH", "Graph dump: 1 all, 2 without weights, 3 structure.", _NO_DUMP),
    ("DUMP_GRAPH_PATH", "Root of the graph dump.", _NO_DUMP),
    ("PRINT_MODEL", "Write the graph before and after partitioning.", _NO_DUMP),
    ("ASCEND_GLOBAL_LOG_LEVEL", "Log level.", recorded("Python's logging decides.")),
    ("ENABLE_DYNAMIC_SHAPE_MULTI_STREAM", "Several streams with dynamic shapes.", _NO_DEVICE),
    (
        "FUSION_TENSOR_SIZE",
        "Size in bytes of the buffer that fuses gradients.",
        works(
            "Size of a group of gradients that are sent together. Default: 4 MB for each rank, 1.35 MB with "
            "iterations_per_loop above 4."
        ),
    ),
    (
        "NPU_ALLOW_OPEN_PORTS",
        "Of this package. 1: TensorFlow's own collectives can open ports to other hosts.",
        works("These ports ask for no secret. npu-run --allow-open-ports sets the variable."),
    ),
    (
        "NPU_BRIDGE_VERBOSE",
        "Of this package. 1: show all messages of TensorFlow about itself and about TF 1.",
        works("These messages are hidden by default. npu-run --verbose sets the variable."),
    ),
    (
        "NPU_COLLECTIVES",
        "Of this package. horovod or tensorflow: what several ranks exchange tensors with.",
        works("Default: horovod if it is installed. npu-run --collectives sets the variable."),
    ),
    (
        "NPU_COMMUNICATION_PRIORITY",
        "Of this package. 1: the threads of Horovod run before those that compute.",
        works("Under Gloo, where the process may use real-time priorities (CAP_SYS_NICE)."),
    ),
    (
        "NPU_OVERLAPPED_STEPS",
        "Of this package. 1: steps of iterations_per_loop overlap, 0: they do not.",
        works("By default, the ranks try what is faster. The results are the same."),
    ),
    (
        "NPU_TRANSFERS_IN_FLIGHT",
        "Of this package. Maximum number of gradient transfers at a time.",
        works("Default: 3, or 4 in steps that overlap. The decision about a step waits for these transfers only."),
    ),
)
VARIABLES = (
    *(EnvironmentVariable(*row) for row in _DOCUMENTED),
    *(EnvironmentVariable(*row, is_documented=False) for row in _OTHERS),
)
