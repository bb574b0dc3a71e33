"""`Precision`: the mixed precision that options ask for, and the policy of each session run."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.machine import missing_units
from npu_bridge.options import AccelerateTrainMode, TrainingOptions, parse_accelerate_train_mode
from npu_bridge.session.precision import exemptions, rewriter, rounding
from npu_bridge.session.precision.executed import Executed
from npu_bridge.session.precision.imitation import Imitation
from npu_bridge.session.precision.mixlist import Mixlist, read_mixlist
from npu_bridge.session.precision.modes import BFLOAT16, FLOAT16, ORIGINAL, Policy, is_permission, policy_of
from npu_bridge.session.precision.op_lists import OpLists, registered
from npu_bridge.session.precision.operator_dtypes import OperatorDtypes, read_operator_dtypes
from npu_bridge.session.precision.switch import Switch

# Step times of BERT tiny relative to float32: medians of `benchmarks/precision_switch.py --model bert`.
_COSTS = {FLOAT16: 1.6, BFLOAT16: 1.4}


def check_files(options: TrainingOptions) -> None:
    """Reads the files that options of precision name, to raise their errors early.

    Raises:
      ValueError: a file cannot be read, or its contents are not legal.
    """
    if options.modify_mixlist:
        read_mixlist(options.modify_mixlist)
    if options.customize_dtypes:
        read_operator_dtypes(options.customize_dtypes)


class Precision:
    """The precision of one training, with all its successive sessions.

    It holds whether the switch of an accelerated training has happened, so that a session that follows a failed one,
    and a second call of `train`, do not start again in low precision.

    Attributes:
      configured: the policy of the configured mode.
      low: the policy of the low-precision part of an accelerated training; None without one.
      switch: when that part ends; None without one.
      low_dtype: the dtype some operators are lowered to; None when every operator keeps its dtype.
      imitation: the imitation of this dtype if TensorFlow does not lower to it, else None.

    Args:
      options: the options of the run.
      op_lists: changes to the lists of mixed precision for functions; graphs of sessions have their own, registered.
    Raises:
      ValueError: a file named by an option cannot be used, or two options ask for different low dtypes.
    """

    def __init__(self, options: TrainingOptions, op_lists: OpLists | None = None):
        self.configured, self.low, self.switch = ORIGINAL, None, None
        self._op_lists = op_lists or OpLists()
        self._looks_inside = [name for name in ("enable_dump", "enable_dump_debug") if getattr(options, name)]
        self._mixlist, self._dtypes = Mixlist(), OperatorDtypes({}, {}, {}, {})
        self._executed: Executed | None = None
        plan = self._read(options) if options.use_off_line else None
        self.low_dtype = self._single_low_dtype()
        self.imitation = self._new_imitation()
        if plan is not None:
            words = "float32" if self.configured == ORIGINAL else str(self.configured)
            self.switch = Switch(plan, options.iterations_per_loop, words, self.low.dtype_words)

    @property
    def is_active(self) -> bool:
        """Whether sessions have to be prepared and attached."""
        return self.low_dtype is not None or self._dtypes.rounds

    def prepare(self, session_config: Any) -> None:
        """Changes a ConfigProto so that its sessions can follow the precision; does nothing if nothing is lowered."""
        if self.low_dtype is None:
            return
        if self.imitation is not None:
            text = f"precision: float32 operators on values rounded to {self.low_dtype} imitate {self.low_dtype} here"
            say_once(
                logging.INFO, f"{text}, which takes longer than float32: {_COSTS[self.low_dtype]} times on BERT tiny."
            )
            return
        rewriter.switch_on(session_config, self.low_dtype)
        is_on_cpu = rewriter.device_kind() == "CPU"
        if self.low_dtype == FLOAT16 and is_on_cpu:
            text = "precision: float16 kernels are used, which take many times as long on a CPU as float32 kernels on"
            say_once(logging.WARNING, f"{text} rounded values. Unset {rewriter.IMITATION} for the faster way.")
        for name in self._looks_inside:
            # The rewriter does not lower fetched operators, and this option fetches every tensor it examines.
            say_once(
                logging.WARNING,
                f"{name}: examined operators keep their dtype, so these steps do not compute in "
                f"{self.low_dtype}, and overflows of {self.low_dtype} do not show. Leave {name} out to train in it.",
            )
        missing = missing_units(BFLOAT16) if is_on_cpu and self.low_dtype == BFLOAT16 else None
        if missing:
            say_once(logging.INFO, f"precision: {self.low_dtype} saves no time here, because {missing}.")

    def policy_of_run(self, trained: frozenset[str]) -> Policy:
        """Returns the policy of a run that is about to start; only runs that train are accelerated.

        Args:
          trained: names of the variables it trains, empty when it does not train.
        Raises:
          ValueError: see `Switch.is_over`.
        Ranks: as `Switch.is_over`.
        """
        if self.switch is not None and trained and not self.switch.is_over(trained):
            return self.low
        if self.configured.reach == "all" and trained:
            say_once(logging.WARNING, "precision: float16 in all operators is meant for inference, not for training.")
        return self.configured

    def is_to_be_asked(self, policy: Policy) -> bool:
        """Returns whether to count the lowered operators of a training step: of the first one under a low policy."""
        return policy.low_dtype is not None and self._executed is None

    def note_executed(self, policy: Policy, executed: Executed | None) -> None:
        """Notes the count of the first training step under a policy, and warns if none of its operators is lowered."""
        self._executed = executed or Executed(1, 1)  # without a count, it is assumed to be lowered
        if self.is_in_vain and environment.probable_rank() == 0:
            text = (
                f"precision: {policy.low_dtype} was asked for, and none of the {self._executed.total} operators of "
                f"this training step is lowered: all of them compute in float32."
            )
            say_once(logging.WARNING, text)
        self.tell_plan()

    def tell_plan(self) -> None:
        """Logs the plan of an accelerated training that has begun, once."""
        if self.switch is not None:
            self.switch.tell_plan(self.is_in_vain)

    @property
    def is_in_vain(self) -> bool:
        """Whether the operators of a training step were counted and none computes in the low dtype."""
        return self._executed is not None and not self._executed.lowered

    def as_executed(self, policy: Policy | None) -> Policy | None:
        """Returns the policy that a training step really follows: the original one if it lowers nothing."""
        return ORIGINAL if policy is not None and self.is_in_vain else policy

    def variables(self, policy: Policy, graph: tf.Graph | None) -> dict[str, str]:
        """Returns the environment variables to set while an executor of a graph is built under a policy.

        Without a graph they are for functions yet to come, which can hold operators of every type.
        """
        if graph is None:
            types = () if policy.reach == "mixed" else dir(tf.raw_ops)
            asked, lists = self._dtypes.by_type, self._op_lists
        else:
            types, asked = rewriter.types_in(graph), exemptions.asked_types(self._dtypes, graph)
            lists = registered(graph)
        return rewriter.variables_of(rewriter.make_lists(policy, types, self._mixlist, asked, lists.as_mixlist()))

    @property
    def asks_for_single_operators(self) -> bool:
        """Whether rules name operators, or round single inputs or outputs."""
        return bool(self._dtypes.by_name) or self._dtypes.rounds

    def round_new_operators(self, graph: tf.Graph) -> None:
        """Rounds values of a graph's new operators: as `customize_dtypes` asks, and to imitate a dtype."""
        rounding.round_values(self._dtypes, graph)
        if self.imitation is not None:
            self.imitation.round_new_operators(graph)

    def kept_ops(self, policy: Policy, ops: Iterable[tf.Operation]) -> list[tf.Operation]:
        """Returns the operators of a run that keep their dtype under a policy."""
        ops = sorted(ops, key=lambda op: op.name)
        lists = [self._mixlist, *([registered(ops[0].graph).as_mixlist()] if ops else [])]
        return exemptions.kept_ops(self._dtypes, policy, ops, frozenset().union(*(each.allowed for each in lists)))

    def _read(self, options: TrainingOptions) -> AccelerateTrainMode | None:
        """Reads the options; returns the plan of an accelerated training."""
        self.configured = policy_of(options, gains_from_float16=rewriter.device_kind() == "GPU")
        if is_permission(options) and self.configured == ORIGINAL:
            say_once(logging.INFO, "precision: allow_fp32_to_fp16 permits float16; this CPU stays in float32.")
        plan = parse_accelerate_train_mode(options.accelerate_train_mode)
        if plan is not None:
            self.low = Policy("mixed", plan.low_dtype)
        if options.modify_mixlist:
            self._mixlist = read_mixlist(options.modify_mixlist)
        if options.customize_dtypes:
            self._dtypes = read_operator_dtypes(options.customize_dtypes)
        return plan

    def _new_imitation(self) -> Imitation | None:
        """Makes the imitation of the low dtype, if TensorFlow cannot lower to it or lacks a type that a file names."""
        dtype = self.low_dtype
        if dtype is None:
            return None
        named = {name for name, asked in self._dtypes.by_type.items() if asked == dtype} | self._mixlist.allowed
        if rewriter.lowers(dtype) and not any(rewriter.lacks_kernel(name, dtype) for name in named):
            return None
        self.configured, self.low = (_imitated(policy) for policy in (self.configured, self.low))
        policies = [policy for policy in (self.configured, self.low) if policy is not None]
        return Imitation(dtype, policies, self.variables, self.kept_ops)

    def _single_low_dtype(self) -> str | None:
        asked = {*self._dtypes.by_name.values(), *self._dtypes.by_type.values()} - {"float32"}
        asked.update(policy.low_dtype for policy in (self.configured, self.low) if policy and policy.low_dtype)
        if len(asked) > 1:
            got = " and ".join(sorted(asked))
            fix = "Let customize_dtypes, the precision mode and accelerate_train_mode name the same one."
            raise ValueError(message("precision", "options ask for different dtypes", "one low dtype", got, fix))
        return asked.pop() if asked else None


def _imitated(policy: Policy | None) -> Policy | None:
    return policy if policy in (None, ORIGINAL) else policy._replace(is_imitated=True)
