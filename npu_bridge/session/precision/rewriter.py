"""Settings of TensorFlow's auto-mixed-precision graph rewriter: its switches and its lists of operator types.

When a session builds an executor, the rewriter goes over a copy of the graph, inserts casts and changes the dtype of
operators. What it may change is read from the environment at that moment, so one session can build executors of
different precision. Facts about TensorFlow 2.15:

- Only operator types of the allow list start a change; with none of them in the graph, the graph stays as it is, node
  for node. Infer-list types follow the operators before them, clear-list types join two changed neighbours, deny-list
  types never change. A type in two lists is an error.
- Operators that are fetched, or run as a target of their own, are left alone.
- Operators on reference variables, stateful ones, and ones without a kernel in the low dtype are left alone.
- On CPUs float16 is by default only imitated: float32 kernels on values rounded to float16. A variable makes the
  kernels real. They add up in float16, and products are many times slower, on CPUs with float16 units too, which
  TensorFlow's products do not use: with `avx512_fp16` one of 128 x 128 took 17 times as long as imitated, one of
  1024 x 1024 150 times, with oneDNN and without.
- Imitation ends the process when an operator stands before one whose value it takes: a C++ exception nobody catches.
  Functions put in the place of their calls, other passes, and a second round of all make such orders, and the way back
  of a loop is one. The pass "dependency" sorts the operators, so it goes right before, and loops are left out. It puts
  the last operators in the place of those it takes out after sorting, so it goes twice: then there are none to take.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from npu_bridge.base import environment
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.tf_internals.graphs import function_definitions, operator_definition
from npu_bridge.session.precision.mixlist import Mixlist
from npu_bridge.session.precision.modes import BFLOAT16, FLOAT16, Policy

IMITATION = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_EMULATE_FP16"
_PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
_LISTS = ("ALLOWLIST", "INFERLIST", "CLEARLIST", "DENYLIST")
_SWITCHES = {
    ("CPU", FLOAT16): "auto_mixed_precision_cpu",
    ("CPU", BFLOAT16): "auto_mixed_precision_onednn_bfloat16",
    ("GPU", FLOAT16): "auto_mixed_precision",
}
MATRIX_TYPES = frozenset(
    {
        "BatchMatMul",
        "BatchMatMulV2",
        "BatchMatMulV3",
        "Conv2D",
        "Conv2DBackpropFilter",
        "Conv2DBackpropInput",
        "Conv3D",
        "Conv3DBackpropFilter",
        "Conv3DBackpropFilterV2",
        "Conv3DBackpropInput",
        "Conv3DBackpropInputV2",
        "DepthwiseConv2dNative",
        "DepthwiseConv2dNativeBackpropFilter",
        "DepthwiseConv2dNativeBackpropInput",
        "Einsum",
        "MatMul",
    }
)
# What a loop is made of.
_LOOP_TYPES = frozenset({"Enter", "Exit", "Merge", "NextIteration", "Switch"})
# The pass that sorts, and the passes TensorFlow runs after the rewriter, with the setting that switches each off.
_SORTING = "dependency"
_LATER_PASSES = {
    "arithmetic": "arithmetic_optimization",
    "layout": "layout_optimizer",
    "remap": "remapping",
    "loop": "loop_optimization",
}
# Never forced into a list: what only moves values between frames (the rewriter colours loops as a whole), has no
# single dtype, or holds its value as an attribute.
_LEFT_ALONE = frozenset(
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


class Lists(NamedTuple):
    """Operator types put into one list each; `removed` ones are taken out of all, as far as they are in one."""

    allow: frozenset[str] = frozenset()
    infer: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()


def device_kind() -> str:
    """ "GPU" when TensorFlow sees one, else "CPU"."""
    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


def can_lower(low_dtype: str) -> bool:
    """Whether the rewriter knows this dtype on this machine's devices."""
    return (device_kind(), low_dtype) in _SWITCHES


def switch_on(session_config: Any, low_dtype: str) -> None:
    """Lets sessions with these settings run the rewriter if it knows the dtype; says so when others keep it off."""
    rewrites = session_config.graph_options.rewrite_options
    if can_lower(low_dtype):
        name = _SWITCHES[device_kind(), low_dtype]
        setattr(rewrites, name, RewriterConfig.ON)
        if rewrites.optimizers and name not in rewrites.optimizers:
            rewrites.optimizers.append(name)  # where passes are listed, only those listed run, whatever is on
    for is_in_the_way, setting, fix in (
        (rewrites.disable_meta_optimizer, "disable_meta_optimizer is set", "Unset it."),
        (
            low_dtype == BFLOAT16 and environment.read_variable("TF_ENABLE_ONEDNN_OPTS") == "0",
            "TF_ENABLE_ONEDNN_OPTS is 0",
            "Unset it.",
        ),
    ):
        if is_in_the_way:
            text = message(
                "precision_mode", f"nothing will run in {low_dtype}", "TensorFlow's rewriter on", setting, fix
            )
            say_once(logging.WARNING, text)


def keep_order(session_config: Any) -> None:
    """Lets sessions made with these settings show the rewriter operators in an order it can imitate float16 in.

    `switch_on` comes before. The rewriter goes right after the pass that sorts operators, and some passes are left out.
    """
    rewrites = session_config.graph_options.rewrite_options
    rewrites.meta_optimizer_iterations = RewriterConfig.ONE
    name = _SWITCHES["CPU", FLOAT16]
    later = [listed for listed in rewrites.optimizers if listed not in (_SORTING, name)]
    if not rewrites.optimizers:
        later = [each for each, switch in _LATER_PASSES.items() if getattr(rewrites, switch) != RewriterConfig.OFF]
    del rewrites.optimizers[:]
    rewrites.optimizers.extend([_SORTING, _SORTING, name, *later])  # where passes are listed, they run in that order


def leave_loops_out() -> None:
    """Leaves loops out of imitation for the rest of the process, also where no lists of a policy are in force."""
    variable = f"{_PREFIX}CLEARLIST_REMOVE"
    said = filter(None, (environment.read_variable(variable) or "").split(","))
    environment.write_variable(variable, ",".join(sorted({*said, *_LOOP_TYPES})))


def make_lists(
    policy: Policy,
    types: Iterable[str],
    mixlist: Mixlist,
    asked_types: dict[str, str],
    registered: Mixlist | None = None,
) -> Lists:
    """The lists that make the rewriter follow a policy.

    Args:
      policy: what is wanted.
      types: operator types of the graph.
      mixlist: changes the user made to the lists of mixed precision.
      asked_types: dtype by operator type; wins over everything else.
      registered: changes that go with the graph, for every policy that lowers something; they win over `mixlist`.
    """
    types = frozenset(types)
    allow, infer, deny, removed = set(), set(), set(), set()
    if policy.reach == "mixed":
        allow, infer, deny = set(mixlist.allowed), set(mixlist.following), set(mixlist.denied)
    elif policy.reach == "matrix":
        allow, removed = set(MATRIX_TYPES), set(types)
    elif policy.reach == "all":
        allow = {name for name in types if _computes(name)}
    else:
        removed = set(types)
    if registered is not None and policy.reach != "nothing":
        moved = frozenset().union(*registered)
        allow, infer, deny = allow - moved, infer - moved, deny - moved
        allow, infer, deny = allow | registered.allowed, infer | registered.following, deny | registered.denied
    lowered = {name for name, dtype in asked_types.items() if dtype != "float32"}
    kept = frozenset(asked_types) - lowered
    allow, infer, deny = (allow | lowered) - kept, infer - lowered - kept, (deny - lowered) | kept
    return Lists(*map(frozenset, (allow, infer, deny, removed - allow - infer - deny)))


def is_imitation_on() -> bool:
    """Whether a CPU computes float16 by float32 kernels on rounded values: unless a user's variable says otherwise."""
    said = environment.read_variable(IMITATION)
    return said is None or said.lower() not in ("0", "false")


def variables_of(lists: Lists, imitation: bool = False) -> dict[str, str]:
    """What the environment has to say while an executor is built, on top of what it says already."""
    if imitation:
        lists = lists._replace(removed=lists.removed | (_LOOP_TYPES - lists.allow - lists.infer - lists.deny))
    wanted = {"ALLOWLIST": lists.allow, "INFERLIST": lists.infer, "DENYLIST": lists.deny, "CLEARLIST": frozenset()}
    everywhere = lists.allow | lists.infer | lists.deny | lists.removed
    variables = {IMITATION: "1" if imitation else "0"}
    for name in _LISTS:
        # A denied type may stay denied; every other list loses what another list has got.
        lost = everywhere - wanted[name] - (lists.removed if name == "DENYLIST" else frozenset())
        for change, changed in (("ADD", wanted[name]), ("REMOVE", lost)):
            variable = f"{_PREFIX}{name}_{change}"
            said = (environment.read_variable(variable) or "").split(",")
            variables[variable] = ",".join(sorted(set(filter(None, said)) | changed))
    return variables


def types_in(graph: tf.Graph) -> frozenset[str]:
    """The operator types of a graph and of the functions it holds."""
    inside = {node.op for function in function_definitions(graph) for node in function.node_def}
    return frozenset(inside.union(op.type for op in graph.get_operations()))


def has_floating_type(name: str) -> bool:
    """Whether there is an operator type of this name with an input that may be float16 as well as float32."""
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


def _computes(name: str) -> bool:
    """Whether operators of a type take and give numbers and keep no state."""
    if name in _LEFT_ALONE or "TensorList" in name:
        return False
    definition = operator_definition(name)
    if definition is None or definition.is_stateful or not definition.input_arg:
        return False
    arguments = [*definition.input_arg, *definition.output_arg]
    return any(argument.type_attr for argument in definition.input_arg) and not any(arg.is_ref for arg in arguments)
