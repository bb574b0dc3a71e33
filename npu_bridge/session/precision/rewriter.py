"""Sets the lists of operator types that stay float32 or are lowered, for TensorFlow's auto-mixed-precision rewriter.

When a session builds an executor, the rewriter changes dtypes of operators and inserts casts, in a copy of the graph.
It reads its lists from the environment at that moment, so one session can build executors of different precision. Facts
about TensorFlow 2.15:

- Only operator types of the allow list start a change; without such operators the graph is not changed at all.
  Infer-list types follow the operators before them, clear-list types join two changed neighbours, deny-list types never
  change. A type in two lists is an error.
- Operators that are fetched, or are targets of a run, are left alone.
- Stateful operators, and operators on reference variables or without a kernel in the low dtype, are left alone.
- float16 kernels of CPUs sum in float16, and matrix products are many times slower than in float32. TensorFlow's
  products do not use the float16 units of CPUs that have such units: with `avx512_fp16` a 128 x 128 product took 17
  times as long as a float32 product of rounded values, a 1024 x 1024 product 150 times, with or without oneDNN. So
  float16 kernels run only if an environment variable asks for them; otherwise float16 is imitated (`imitation.py`).
- bfloat16 is lowered only on CPUs with AVX-512, by oneDNN. On other CPUs bfloat16 is imitated.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from npu_bridge.base import environment
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.tf_internals.functions import rewritten_graph
from npu_bridge.base.tf_internals.graphs import function_definitions, has_kernel, operator_definition
from npu_bridge.session.precision.mixlist import Mixlist
from npu_bridge.session.precision.modes import BFLOAT16, FLOAT16, Policy
from npu_bridge.session.precision.type_lists import MATRIX_TYPES, PREFIX

IMITATION = f"{PREFIX}EMULATE_FP16"
_LISTS = ("ALLOWLIST", "INFERLIST", "CLEARLIST", "DENYLIST")
_SWITCHES = {
    ("CPU", FLOAT16): "auto_mixed_precision_cpu",
    ("CPU", BFLOAT16): "auto_mixed_precision_onednn_bfloat16",
    ("GPU", FLOAT16): "auto_mixed_precision",
}
# Never forced into a list: types that only move values between frames (the rewriter colours loops as a whole), have
# no single dtype, or hold their value as an attribute.
_EXCLUDED_TYPES = frozenset(
    {
        "Cast",
        "Const",
        "Enter",
        "Exit",
        "Identity",
        "IdentityN",
        "LoopCond",
        "Merge",
        "NextIteration",
        "NoOp",
        "Placeholder",
        "PlaceholderWithDefault",
        "SoftmaxCrossEntropyWithLogits",
        "Switch",
    }
)


class RewriterLists(NamedTuple):
    """Changes to the rewriter's lists: operator types to add to each list, and types to remove (`removed`)."""

    allow: frozenset[str] = frozenset()
    infer: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()


def main_device_kind() -> str:
    """Returns "GPU" if TensorFlow has a GPU, else "CPU"."""
    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


def can_lower(low_dtype: str) -> bool:
    """Returns whether TensorFlow's rewriter can lower operators to a dtype on this machine."""
    if main_device_kind() == "GPU":
        return ("GPU", low_dtype) in _SWITCHES
    return not is_imitation_on() if low_dtype == FLOAT16 else _lowers_bfloat16()


def lacks_kernel(op_type: str, low_dtype: str) -> bool:
    """Returns whether an operator type has a float32 kernel on this machine, but no kernel in the low dtype."""
    return has_kernel(op_type, tf.float32, main_device_kind()) and not has_kernel(
        op_type, tf.as_dtype(low_dtype), main_device_kind()
    )


@functools.cache
def _lowers_bfloat16() -> bool:
    """Finds by a trial whether the rewriter lowers to bfloat16, which depends on processor, oneDNN and build."""
    config = tf.compat.v1.ConfigProto()
    name = _SWITCHES["CPU", BFLOAT16]
    rewrites = config.graph_options.rewrite_options
    setattr(rewrites, name, RewriterConfig.ON)
    rewrites.optimizers.append(name)
    rewrites.min_graph_nodes = -1
    with tf.Graph().as_default() as graph:
        matrix = tf.compat.v1.placeholder(tf.float32, [2, 2])
        product = tf.matmul(matrix, matrix)
        result = tf.identity(product)
    try:
        own_lists = {f"{PREFIX}{name}_{change}": "" for name in _LISTS for change in ("ADD", "REMOVE")}
        with environment.set_variables_temporarily(lambda: own_lists):
            nodes = rewritten_graph(graph, [result.op.name], config).node
    except tf.errors.OpError:  # a build without oneDNN
        return False
    return any(node.name == product.op.name and node.attr["T"].type == tf.bfloat16.as_datatype_enum for node in nodes)


def turn_on_rewriter(session_config: Any, low_dtype: str) -> bool:
    """Turns the rewriter on in session settings, for a dtype to which it can lower on this machine.

    Returns:
      False, after a warning, if other settings keep it from running.
    """
    rewrites = session_config.graph_options.rewrite_options
    name = _SWITCHES[main_device_kind(), low_dtype]
    setattr(rewrites, name, RewriterConfig.ON)
    if rewrites.optimizers and name not in rewrites.optimizers:
        rewrites.optimizers.append(name)  # if passes are listed, only the listed passes run
    if rewrites.disable_meta_optimizer:
        problem, got = f"nothing will run in {low_dtype}", "disable_meta_optimizer=True"
        say_once(
            logging.WARNING, message("precision_mode", problem, "disable_meta_optimizer=False", got, "Leave it out.")
        )
    return not rewrites.disable_meta_optimizer


def make_rewriter_lists(
    policy: Policy,
    types: Iterable[str],
    mixlist: Mixlist,
    requested_types: dict[str, str],
    registered: Mixlist | None = None,
) -> RewriterLists:
    """Returns the changes to the rewriter's lists that make the rewriter follow a policy.

    Args:
      policy: the policy to follow.
      types: operator types of the graph.
      mixlist: the user's changes to the lists of mixed precision.
      requested_types: requested dtypes by operator type, which win over everything else.
      registered: changes registered with the graph, which win over `mixlist`; used if the policy lowers any operators.
    """
    types = frozenset(types)
    allow, infer, deny, removed = set(), set(), set(), set()
    if policy.reach == "mixed":
        allow, infer, deny = set(mixlist.allowed), set(mixlist.following), set(mixlist.denied)
    elif policy.reach == "matrix":
        allow, removed = set(MATRIX_TYPES), set(types)
    elif policy.reach == "all":
        allow = {name for name in types if _has_typed_inputs_and_no_state(name)}
    else:
        removed = set(types)
    if registered is not None and policy.reach != "nothing":
        moved = frozenset().union(*registered)
        allow, infer, deny = allow - moved, infer - moved, deny - moved
        allow, infer, deny = allow | registered.allowed, infer | registered.following, deny | registered.denied
    lowered = {name for name, dtype in requested_types.items() if dtype != "float32"}
    kept = frozenset(requested_types) - lowered
    allow, infer, deny = (allow | lowered) - kept, infer - lowered - kept, (deny - lowered) | kept
    return RewriterLists(*map(frozenset, (allow, infer, deny, removed - allow - infer - deny)))


def is_imitation_on() -> bool:
    """Returns whether a CPU imitates float16 with rounded float32 values; an environment variable can turn this off."""
    said = environment.read_outside_blocks(IMITATION)
    return said is None or said.lower() not in ("0", "false")


def list_variables(lists: RewriterLists) -> dict[str, str]:
    """Returns the environment variables that pass changes to the rewriter: their present values with `lists` added."""
    wanted = {"ALLOWLIST": lists.allow, "INFERLIST": lists.infer, "DENYLIST": lists.deny, "CLEARLIST": frozenset()}
    everywhere = lists.allow | lists.infer | lists.deny | lists.removed
    variables = {IMITATION: "0"}
    for name in _LISTS:
        # A removed type may stay denied; every other list loses the types of the others.
        lost = everywhere - wanted[name] - (lists.removed if name == "DENYLIST" else frozenset())
        for change, changed in (("ADD", wanted[name]), ("REMOVE", lost)):
            variable = f"{PREFIX}{name}_{change}"
            said = (environment.read_outside_blocks(variable) or "").split(",")
            variables[variable] = ",".join(sorted(set(filter(None, said)) | changed))
    return variables


def operator_types_in(graph: tf.Graph) -> frozenset[str]:
    """Returns the operator types in a graph and its functions."""
    inside = {node.op for function in function_definitions(graph) for node in function.node_def}
    return frozenset(inside.union(op.type for op in graph.get_operations()))


def has_floating_type(name: str) -> bool:
    """Returns whether an operator type exists and has an input that can be float16 or float32."""
    definition = operator_definition(name)
    if definition is None:
        return False
    inputs = {argument.type_attr or argument.type_list_attr for argument in definition.input_arg}
    for attribute in definition.attr:
        if attribute.name in inputs:
            legal = attribute.allowed_values.list.type
            if not legal or {tf.float16.as_datatype_enum, tf.float32.as_datatype_enum} <= set(legal):
                return True
    return False


def _has_typed_inputs_and_no_state(op_type: str) -> bool:
    """Returns whether operators of a type have typed inputs and keep no state."""
    if op_type in _EXCLUDED_TYPES or "TensorList" in op_type:
        return False
    definition = operator_definition(op_type)
    if definition is None or definition.is_stateful or not definition.input_arg:
        return False
    arguments = [*definition.input_arg, *definition.output_arg]
    return any(argument.type_attr for argument in definition.input_arg) and not any(arg.is_ref for arg in arguments)
