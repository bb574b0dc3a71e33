"""`Precision`: holds the mixed precision that options ask for, and decides the policy of each session run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.machine import missing_cpu_units
from npu_bridge.graph.operators import warn_of_unknown_operators
from npu_bridge.options import AccelerateTrainMode, TrainingOptions, parse_accelerate_train_mode
from npu_bridge.session.precision import exemptions, rewriter, rounding
from npu_bridge.session.precision.imitation import Imitation
from npu_bridge.session.precision.mixlist import Mixlist, read_mixlist
from npu_bridge.session.precision.modes import (
    BFLOAT16,
    FLOAT16,
    ORIGINAL,
    Policy,
    configured_policy,
    only_permits_float16,
)
from npu_bridge.session.precision.op_lists import OpLists, registered_lists
from npu_bridge.session.precision.operator_dtypes import OperatorDtypes, read_operator_dtypes
from npu_bridge.session.precision.switch import Switch
from npu_bridge.session.precision.type_lists import type_lists_for

# Step times of BERT tiny relative to float32: medians of `benchmarks/precision_switch.py --model bert`.
_COSTS = {FLOAT16: 1.6, BFLOAT16: 1.4}


def check_files(options: TrainingOptions) -> None:
    """Reads the files named by `modify_mixlist` and `customize_dtypes`, so that their errors are raised early.

    Raises:
      ValueError: a file cannot be read, or its content is not legal.
    """
    if options.modify_mixlist:
        read_mixlist(options.modify_mixlist)
    if options.customize_dtypes:
        read_operator_dtypes(options.customize_dtypes)


class Precision:
    """The mixed precision of one training, shared by all its successive sessions.

    It remembers whether an accelerated training has switched to the original precision. So a session after a failed
    session, and a second call of `train`, do not start again in low precision.

    Attributes:
      configured: the policy of the configured mode.
      low: the policy of the low-precision part of a training; None if the training is not accelerated.
      switch: decides when the low-precision part ends; None if the training is not accelerated.
      low_dtype: the dtype to which operators are lowered; None if every operator keeps its dtype.
      imitation: imitates `low_dtype` if TensorFlow cannot lower to this dtype, else None.

    Args:
      options: the options of the run.
      op_lists: changes to the lists of mixed precision, for functions only; for sessions, changes are registered with
        the graph.
    Raises:
      ValueError: a file named by an option cannot be used, or two options ask for different low dtypes.
    """

    def __init__(self, options: TrainingOptions, op_lists: OpLists | None = None):
        self.configured, self.low, self.switch = ORIGINAL, None, None
        self._op_lists = op_lists or OpLists()
        self._fetching_options = [name for name in ("enable_dump", "enable_dump_debug") if getattr(options, name)]
        self._mixlist, self._dtypes = Mixlist(), OperatorDtypes({}, {}, {}, {})
        self._lowers: bool | None = None  # whether training steps compute in the low dtype, once one has begun
        plan = self._read_options(options) if options.use_off_line else None
        self.low_dtype = self._single_low_dtype()
        self.imitation = self._make_imitation()
        if plan is not None:
            words = "float32" if self.configured == ORIGINAL else str(self.configured)
            self.switch = Switch(plan, options.iterations_per_loop, words, self.low.dtype_description)

    @property
    def is_active(self) -> bool:
        """Whether sessions need `prepare` and `attach_precision`."""
        return self.low_dtype is not None or self._dtypes.has_rounding

    def prepare(self, session_config: Any) -> None:
        """Changes session settings so that sessions can follow the precision; has no effect if `low_dtype` is None."""
        if self.low_dtype is None:
            return
        if self.imitation is not None:
            text = f"precision: float32 operators on values rounded to {self.low_dtype} imitate {self.low_dtype} here"
            say_once(
                logging.INFO, f"{text}, which takes longer than float32: {_COSTS[self.low_dtype]} times on BERT tiny."
            )
            return
        if not rewriter.turn_on_rewriter(session_config, self.low_dtype):
            self._lowers = False
        is_on_cpu = rewriter.main_device_kind() == "CPU"
        if self.low_dtype == FLOAT16 and is_on_cpu:
            text = "precision: float16 kernels are used, which take many times as long on a CPU as float32 kernels on"
            say_once(logging.WARNING, f"{text} rounded values. Unset {rewriter.IMITATION} for the faster way.")
        for name in self._fetching_options:
            # The rewriter does not lower fetched operators, and this option fetches every tensor it examines.
            say_once(
                logging.WARNING,
                f"{name}: examined operators keep their dtype, so these steps do not compute in "
                f"{self.low_dtype}, and overflows of {self.low_dtype} do not show. Leave {name} out to use this dtype.",
            )
        missing = missing_cpu_units(BFLOAT16) if is_on_cpu and self.low_dtype == BFLOAT16 else None
        if missing:
            say_once(logging.INFO, f"precision: {self.low_dtype} saves no time here, because {missing}.")

    def policy_of_run(self, trained_variables: frozenset[str]) -> Policy:
        """Returns the policy of a run that is about to start; only training runs can have the policy `low`.

        Args:
          trained_variables: names of the variables that the run trains; empty if it does not train.
        Raises:
          ValueError: before the first run, the environment variables of the trigger are missing or unusable.
        Ranks: collective until the switch.
        """
        if (
            self.switch is not None
            and trained_variables
            and not self.switch.must_use_original_precision(trained_variables)
        ):
            return self.low
        if self.configured.reach == "all" and trained_variables:
            say_once(logging.WARNING, "precision: float16 in all operators is meant for inference, not for training.")
        return self.configured

    def note_training_step(
        self,
        policy: Policy,
        graph: tf.Graph | None,
        count: Callable[[], Mapping[str, int]],
        is_rounding: Callable[[], bool],
    ) -> None:
        """Finds in the first training step whether any operator is lowered, warns if not, and logs the plan.

        Args:
          policy: the policy of the step.
          graph: the step's graph; None for functions.
          count: returns the numbers of the step's float32 operators by type.
          is_rounding: for an imitated dtype, returns whether any operator of the step is rounded.
        """
        if policy.low_dtype is not None and self._lowers is None:
            types = count()
            if self.imitation is not None:
                self._lowers = is_rounding()
            else:
                lists = type_lists_for(policy.low_dtype, self.make_rewriter_environment(policy, graph))
                self._lowers = not lists.allow.isdisjoint(types)
            if not self._lowers and environment.probable_rank() == 0:
                text = (
                    f"precision: {policy.low_dtype} was asked for, and none of the {sum(types.values())} operators of "
                    f"this training step is lowered: all of them compute in float32."
                )
                say_once(logging.WARNING, text)
        if self.switch is not None:
            self.switch.log_plan(self.has_no_effect)

    @property
    def has_no_effect(self) -> bool:
        """Whether a training step has begun that should compute in the low dtype, and no operator of it does."""
        return self._lowers is False

    def policy_followed_by_steps(self, policy: Policy | None) -> Policy | None:
        """Returns the policy that training steps really follow: the original precision if no operator is lowered."""
        return ORIGINAL if policy is not None and self.has_no_effect else policy

    def make_rewriter_environment(self, policy: Policy, graph: tf.Graph | None) -> dict[str, str]:
        """Returns the environment variables to set while an executor of a graph is built under a policy.

        With None instead of a graph, the variables are for functions, which can hold operators of every type.
        """
        if graph is None:
            types = () if policy.reach == "mixed" else dir(tf.raw_ops)
            asked, lists = self._dtypes.by_type, self._op_lists
        else:
            types, asked = rewriter.operator_types_in(graph), exemptions.requested_types(self._dtypes, graph)
            lists = registered_lists(graph)
        return rewriter.list_variables(
            rewriter.make_rewriter_lists(policy, types, self._mixlist, asked, lists.as_mixlist())
        )

    @property
    def has_rules_for_single_ops(self) -> bool:
        """Whether rules of `customize_dtypes` name single operators, or round single inputs or outputs."""
        return bool(self._dtypes.by_name) or self._dtypes.has_rounding

    def warn_of_unknown_operators(self, graph: tf.Graph) -> None:
        """Warns of rules of `customize_dtypes` for operators that a graph does not have."""
        names, fix = (
            {*self._dtypes.by_name, *self._dtypes.rounding_by_name},
            "Operators in functions have no name here.",
        )
        warn_of_unknown_operators("customize_dtypes", names, graph, "names of operators of the graph", fix)

    def round_new_operators(self, graph: tf.Graph) -> None:
        """Adds rounding to a graph's new operators, if `customize_dtypes` asks for it or a dtype is imitated."""
        rounding.round_values_by_rules(self._dtypes, graph)
        if self.imitation is not None:
            self.imitation.round_new_operators(graph)

    def ops_keeping_dtype(self, policy: Policy, ops: Iterable[tf.Operation]) -> list[tf.Operation]:
        """Returns the operators of a run that keep their dtype under a policy."""
        ops = sorted(ops, key=lambda op: op.name)
        lists = [self._mixlist, *([registered_lists(ops[0].graph).as_mixlist()] if ops else [])]
        return exemptions.ops_keeping_dtype(
            self._dtypes, policy, ops, frozenset().union(*(each.allowed for each in lists))
        )

    def _read_options(self, options: TrainingOptions) -> AccelerateTrainMode | None:
        """Reads the options; returns the plan of an accelerated training, or None."""
        self.configured = configured_policy(options, gains_from_float16=rewriter.main_device_kind() == "GPU")
        if only_permits_float16(options) and self.configured == ORIGINAL:
            say_once(logging.INFO, "precision: allow_fp32_to_fp16 permits float16; this CPU stays in float32.")
        plan = parse_accelerate_train_mode(options.accelerate_train_mode)
        if plan is not None:
            self.low = Policy("mixed", plan.low_dtype)
        if options.modify_mixlist:
            self._mixlist = read_mixlist(options.modify_mixlist)
        if options.customize_dtypes:
            self._dtypes = read_operator_dtypes(options.customize_dtypes)
        return plan

    def _make_imitation(self) -> Imitation | None:
        """Makes an imitation of the low dtype if TensorFlow cannot lower to this dtype, or lacks a required kernel."""
        dtype = self.low_dtype
        if dtype is None:
            return None
        named = {name for name, asked in self._dtypes.by_type.items() if asked == dtype} | self._mixlist.allowed
        if rewriter.can_lower(dtype) and not any(rewriter.lacks_kernel(name, dtype) for name in named):
            return None
        self.configured, self.low = (_mark_as_imitated(policy) for policy in (self.configured, self.low))
        policies = [policy for policy in (self.configured, self.low) if policy is not None]
        return Imitation(dtype, policies, self.make_rewriter_environment, self.ops_keeping_dtype)

    def _single_low_dtype(self) -> str | None:
        asked = {*self._dtypes.by_name.values(), *self._dtypes.by_type.values()} - {"float32"}
        asked.update(policy.low_dtype for policy in (self.configured, self.low) if policy and policy.low_dtype)
        if len(asked) > 1:
            got = " and ".join(sorted(asked))
            fix = "Let customize_dtypes, the precision mode and accelerate_train_mode name the same dtype."
            raise ValueError(message("precision", "options ask for different dtypes", "one low dtype", got, fix))
        return asked.pop() if asked else None


def _mark_as_imitated(policy: Policy | None) -> Policy | None:
    return policy if policy in (None, ORIGINAL) else policy._replace(is_imitated=True)
