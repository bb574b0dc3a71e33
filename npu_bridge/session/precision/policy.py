"""`Precision`: the mixed precision that the options of a run ask for, and the policy of each of its session runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.machine import missing_units
from npu_bridge.options import TrainingOptions, parse_accelerate_train_mode
from npu_bridge.session.precision import exemptions, rewriter, rounding
from npu_bridge.session.precision.executed import Executed
from npu_bridge.session.precision.mixlist import Mixlist, read_mixlist
from npu_bridge.session.precision.modes import BFLOAT16, FLOAT16, ORIGINAL, Policy, is_permission, policy_of
from npu_bridge.session.precision.op_lists import OpLists, registered
from npu_bridge.session.precision.operator_dtypes import OperatorDtypes, read_operator_dtypes
from npu_bridge.session.precision.switch import Switch


def check_files(options: TrainingOptions) -> None:
    """Reads the files that options of precision name, so that what is wrong with them is said now.

    Raises:
      ValueError: a file cannot be read, or does not hold what it should.
    """
    if options.modify_mixlist:
        read_mixlist(options.modify_mixlist)
    if options.customize_dtypes:
        read_operator_dtypes(options.customize_dtypes)


class Precision:
    """The precision of one training: of all sessions it has, one after the other.

    Whether the switch of an accelerated training has happened is kept here, so a session that takes over from one
    that failed, and a second call of `train`, go on where they were.

    Attributes:
      configured: the policy of the configured mode.
      low: the policy of the low-precision part of an accelerated training; None without one.
      switch: when that part ends; None without one.
      low_dtype: the dtype some operators are lowered to, None when everything keeps the dtype it has.

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
        if options.use_off_line:
            self._read(options)
        self.low_dtype = self._single_low_dtype()

    @property
    def is_active(self) -> bool:
        """Whether sessions have to be prepared and attached at all."""
        return self.low_dtype is not None or self._dtypes.rounds

    def prepare(self, session_config: Any) -> None:
        """Changes a ConfigProto so that sessions made with it can follow; nothing changes when nothing is lowered."""
        if self.low_dtype is None:
            return
        rewriter.switch_on(session_config, self.low_dtype)
        is_on_cpu = rewriter.device_kind() == "CPU"
        if self.low_dtype == FLOAT16 and is_on_cpu:
            self._prepare_imitation(session_config)
        for name in self._looks_inside:
            # The rewriter leaves alone what is fetched, and this option fetches every number it looks at.
            say_once(
                logging.WARNING,
                f"{name}: operators that are looked at keep their dtype, so these steps do not compute in "
                f"{self.low_dtype}, and overflows of {self.low_dtype} do not show. Leave {name} out to train in it.",
            )
        missing = missing_units(BFLOAT16) if is_on_cpu and self.low_dtype == BFLOAT16 else None
        if missing:
            say_once(logging.INFO, f"precision: {self.low_dtype} saves no time here, because {missing}.")

    def prepare_other_runs(self) -> None:
        """Readies runs for which no lists are in force, such as those that initialise a session: the rewriter is on."""
        if self._imitates:
            rewriter.leave_loops_out()

    def policy_of_run(self, trained: frozenset[str]) -> Policy:
        """The policy of a run that is about to start; only runs that train are accelerated.

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
        """Whether a training step under a policy is to be asked for the graphs it is executed as: the first one.

        Imitated float16 is float32 kernels, so that its graphs show nothing.
        """
        return policy.low_dtype is not None and self._executed is None and not self._imitates

    def note_executed(self, policy: Policy, executed: Executed | None) -> None:
        """Takes what the first training step under a policy was executed as, and says if nothing of it was lowered."""
        self._executed = executed or Executed(1, 1)  # not known; then what was asked for is believed
        if self.is_in_vain and environment.probable_rank() == 0:
            condition = " It does on CPUs with AVX512 alone, unless TF_ENABLE_ONEDNN_OPTS is 0."
            text = (
                f"precision: {policy.low_dtype} was asked for, and TensorFlow lowers none of the {executed.total} "
                f"operators of this training step: all of them compute in float32."
            )
            say_once(logging.WARNING, text + (condition if policy.low_dtype == BFLOAT16 else ""))
        self.tell_plan()

    def tell_plan(self) -> None:
        """Tells the plan of an accelerated training that has begun, if it was not told yet."""
        if self.switch is not None:
            self.switch.tell_plan(self.is_in_vain)

    @property
    def is_in_vain(self) -> bool:
        """Whether a training step was asked, and computes nothing in the low dtype."""
        return self._executed is not None and not self._executed.lowered

    def as_executed(self, policy: Policy | None) -> Policy | None:
        """What a training step under a policy really computes in, as far as it is known."""
        return ORIGINAL if policy is not None and self.is_in_vain else policy

    def variables(self, policy: Policy, graph: tf.Graph) -> dict[str, str]:
        """What the environment has to say while an executor of a graph is built under a policy."""
        types = rewriter.types_in(graph)
        asked = exemptions.asked_types(self._dtypes, graph)
        lists = rewriter.make_lists(policy, types, self._mixlist, asked, registered(graph).as_mixlist())
        return rewriter.variables_of(lists, self._imitates)

    @property
    def asks_for_single_operators(self) -> bool:
        """Whether rules name operators, or round single inputs or outputs."""
        return bool(self._dtypes.by_name) or self._dtypes.rounds

    def variables_of_functions(self, policy: Policy) -> dict[str, str]:
        """As `variables`, for functions that are not there yet: they may hold operators of every type."""
        types = () if policy.reach == "mixed" else dir(tf.raw_ops)
        lists = rewriter.make_lists(policy, types, self._mixlist, self._dtypes.by_type, self._op_lists.as_mixlist())
        return rewriter.variables_of(lists, self._imitates)

    def round_single_values(self, graph: tf.Graph) -> None:
        """Rounds inputs and outputs of operators as `customize_dtypes` asks for single ones; see `rounding`."""
        rounding.round_values(self._dtypes, graph)

    def kept_ops(self, policy: Policy, ops: Iterable[tf.Operation]) -> list[tf.Operation]:
        """The operators of a run that keep their dtype under a policy."""
        ops = sorted(ops, key=lambda op: op.name)
        lists = [self._mixlist, *([registered(ops[0].graph).as_mixlist()] if ops else [])]
        return exemptions.kept_ops(self._dtypes, policy, ops, frozenset().union(*(each.allowed for each in lists)))

    @property
    def _imitates(self) -> bool:
        return self.low_dtype == FLOAT16 and rewriter.device_kind() == "CPU" and rewriter.is_imitation_on()

    def _prepare_imitation(self, session_config: Any) -> None:
        """Readies settings for imitated float16, or says that who asked for float16 kernels waits for them."""
        if self._imitates:
            rewriter.keep_order(session_config)
            say_once(
                logging.INFO,
                "precision: float32 kernels on values rounded to float16 stand in for float16 kernels.",
            )
            return
        text = "precision: float16 kernels are used, which take many times as long on a CPU as float32 kernels on"
        say_once(logging.WARNING, f"{text} rounded values. Unset {rewriter.IMITATION} for the faster way.")

    def _read(self, options: TrainingOptions) -> None:
        self.configured = self._possible(policy_of(options, gains_from_float16=rewriter.device_kind() == "GPU"))
        if is_permission(options) and self.configured == ORIGINAL:
            say_once(logging.INFO, "precision: allow_fp32_to_fp16 permits float16; this CPU stays in float32.")
        plan = parse_accelerate_train_mode(options.accelerate_train_mode)
        if plan is not None and self._possible(Policy("mixed", plan.low_dtype)) != ORIGINAL:
            self.low = Policy("mixed", plan.low_dtype)
            words = "float32" if self.configured == ORIGINAL else str(self.configured)
            self.switch = Switch(plan, options.iterations_per_loop, words)
        if options.modify_mixlist:
            self._mixlist = read_mixlist(options.modify_mixlist)
        if options.customize_dtypes:
            self._dtypes = read_operator_dtypes(options.customize_dtypes)

    def _possible(self, policy: Policy) -> Policy:
        """The policy, or the graph's own dtypes where the rewriter does not know its dtype."""
        if policy == ORIGINAL or rewriter.can_lower(policy.low_dtype):
            return policy
        expected = f"a dtype TensorFlow lowers to on a {rewriter.device_kind()}, float16"
        fix = "Use mixed_float16, or accelerate_train_mode with 'fast'."
        text = message("precision", "everything stays in float32", expected, policy.low_dtype, fix)
        say_once(logging.WARNING, text)
        return ORIGINAL

    def _single_low_dtype(self) -> str | None:
        asked = {*self._dtypes.by_name.values(), *self._dtypes.by_type.values()} - {"float32"}
        asked.update(policy.low_dtype for policy in (self.configured, self.low) if policy and policy.low_dtype)
        if len(asked) > 1:
            got = " and ".join(sorted(asked))
            fix = "Let customize_dtypes, the precision mode and accelerate_train_mode name the same one."
            raise ValueError(message("precision", "options ask for different dtypes", "one low dtype", got, fix))
        return asked.pop() if asked else None
