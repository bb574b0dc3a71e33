"""The documented environment variables: what each means on the NPU stack and what it does here."""

from __future__ import annotations

from typing import NamedTuple

from npu_bridge.base.environment import read_variable
from npu_bridge.options.table import Effect, recorded, works


class Variable(NamedTuple):
    """One environment variable.

    Attributes:
      name: the variable.
      doc: its meaning on the NPU stack.
      effect: what it does here.
      is_documented: whether the NPU stack documents it; the others are read there all the same.
    """

    name: str
    doc: str
    effect: Effect
    is_documented: bool = True

    @property
    def value(self) -> str | None:
        """The value in the environment now, None when unset or empty."""
        return read_variable(self.name)


_OTHER_PRODUCT = recorded("Belongs to the adapter for TensorFlow 2.")
_COMMUNICATION = recorded("Communication is Horovod's.")
_NO_DEVICE = recorded("No NPU is driven.")
_NO_DUMP = recorded("Nothing is dumped.")
_PROGRESS = works("Read before every training run with accelerate_train_mode.")
_FALLBACK = recorded("Read when the option is not set; recorded like it.")

_DOCUMENTED = (
    ("JOB_ID", "Name of the task.", works("Filled when missing, for scripts that read it.")),
    (
        "ASCEND_DEVICE_ID",
        "Device of this process.",
        works("Filled from the launcher's local rank when missing; chooses the GPU like session_device_id."),
    ),
    ("RANK_ID", "Rank of this process.", works("Filled from the launcher's rank when missing.")),
    ("RANK_SIZE", "Number of ranks.", works("Filled from the launcher; a different number is an error.")),
    ("RANK_TABLE_FILE", "JSON file describing the cluster.", works("Its device_id chooses the GPU.")),
    ("CM_CHIEF_IP", "Address the chief listens on.", _COMMUNICATION),
    ("CM_CHIEF_PORT", "Port the chief listens on.", _COMMUNICATION),
    ("CM_CHIEF_DEVICE", "Device of the chief.", _COMMUNICATION),
    ("CM_WORKER_SIZE", "Number of ranks.", works("In place of RANK_SIZE; both together are an error.")),
    ("CM_WORKER_IP", "Address of this host towards the chief.", _COMMUNICATION),
    ("STEP_NOW", "Step reached so far.", _PROGRESS),
    ("TOTAL_STEP", "Steps of the whole training.", _PROGRESS),
    ("LOSS_NOW", "Loss reached so far.", _PROGRESS),
    ("TARGET_LOSS", "Loss the training aims at.", _PROGRESS),
    (
        "ENABLE_FORCE_V2_CONTROL",
        "1 converts control flow for dynamic shapes.",
        recorded("TensorFlow runs it as it is."),
    ),
    ("ENABLE_HF32_EXECUTION", "Allows float32 with an 11-bit mantissa.", _NO_DEVICE),
    ("NPU_DEBUG", "Debug log.", _OTHER_PRODUCT),
    ("NPU_DUMP_GRAPH", "Graph dump.", _OTHER_PRODUCT),
    ("NPU_ENABLE_PERF", "Timing print.", _OTHER_PRODUCT),
    ("NPU_LOOP_SIZE", "Loop size; not iterations_per_loop.", _OTHER_PRODUCT),
)
_OTHERS = (
    ("TF_CONFIG", "Cluster and task of this process.", works("Read by tf.estimator; checked by NPURunConfig.")),
    ("DEVICE_ID", "Old name of the device.", works("Filled like ASCEND_DEVICE_ID.")),
    ("DEVICE_INDEX", "Number of the device in the cluster.", works("Filled from the launcher's rank when missing.")),
    ("AOE_MODE", "aoe_mode when that is not set.", _FALLBACK),
    (
        "PROFILING_MODE",
        "true profiles a run whose configuration does not say.",
        works("Read when the option is not set."),
    ),
    ("PROFILING_OPTIONS", "profiling_options to go with it.", works("Read when the option is not set.")),
    (
        "HCCL_CONNECT_TIMEOUT",
        "Seconds ranks wait for each other at a common point, such as create_group; 120 when unset.",
        works(),
    ),
    ("HCCL_EXEC_TIMEOUT", "hccl_timeout when that is not set.", _FALLBACK),
    ("POD_NAME", "Identity of this process in old rank tables.", recorded("Read by the rank table reader.")),
    ("HEARTBEAT", "Heartbeat of the task.", _NO_DEVICE),
    (
        "LOCAL_CHECKPOINT_DIR",
        "Checkpoint to start from.",
        works("Read by NPUEstimator when it has neither warm_start_from nor a job_start_file."),
    ),
    (
        "RESTORE_FROM",
        "Checkpoint to start from, as a last resort.",
        works("Read by NPUEstimator when nothing else names one."),
    ),
    ("HCCL_SOCKET_FAMILY", "Family of network addresses.", _COMMUNICATION),
    ("HCCL_NPU_SOCKET_PORT_RANGE", "Ports of several processes on a device.", _COMMUNICATION),
    ("ASCEND_WORK_PATH", "Root of files of one process.", _NO_DEVICE),
    ("ASCEND_CACHE_PATH", "Root of shared files.", _NO_DEVICE),
    ("ASCEND_MAX_OP_CACHE_SIZE", "Limit of the kernel cache.", _NO_DEVICE),
    ("ASCEND_REMAIN_CACHE_SIZE_RATIO", "Part of the kernel cache that is kept.", _NO_DEVICE),
    ("NPU_COLLECT_PATH", "Collects graphs and dumps of failures.", _NO_DUMP),
    ("DUMP_GE_GRAPH", "Graph dump: 1 all, 2 without weights, 3 structure.", _NO_DUMP),
    ("DUMP_GRAPH_PATH", "Root of the graph dump.", _NO_DUMP),
    ("PRINT_MODEL", "Writes the graph before and after it is split.", _NO_DUMP),
    ("ASCEND_GLOBAL_LOG_LEVEL", "Log level.", recorded("Python's logging decides.")),
    ("ENABLE_DYNAMIC_SHAPE_MULTI_STREAM", "Several streams with dynamic shapes.", _NO_DEVICE),
    (
        "FUSION_TENSOR_SIZE",
        "Bytes of the buffer gradients are fused in.",
        works("Gradients that are sent at once; 4 MB for each rank when unset."),
    ),
    (
        "NPU_BRIDGE_VERBOSE",
        "Of this package: 1 shows all that TensorFlow says about itself and about TF 1.",
        works("Left out when unset; npu-run --verbose sets it."),
    ),
    (
        "NPU_TRANSFERS_IN_FLIGHT",
        "Of this package: transfers of gradients that may be under way at once.",
        works("3 when unset; a decision about a step waits for no more than these."),
    ),
)
VARIABLES = (*(Variable(*row) for row in _DOCUMENTED), *(Variable(*row, is_documented=False) for row in _OTHERS))
