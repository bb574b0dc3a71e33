"""Applies mixed precision to `tf.function` and compiled Keras models, in eager execution.

TensorFlow builds the executor of a function when it is first called with new settings; the settings belong to the
calling thread. The rewriter reads its lists from the environment at that moment. If a dtype is imitated, rounded copies
of the functions are called instead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any, Callable

from npu_bridge.base import environment
from npu_bridge.base.errors import say_once
from npu_bridge.base.tf_internals.functions import (
    eager_function_definition,
    redirect_calls,
    redirect_calls_in_block,
)
from npu_bridge.base.tf_internals.sessions import (
    copy_with_changed_config,
    function_call_settings,
    set_function_call_settings,
)
from npu_bridge.session.precision.modes import Policy
from npu_bridge.session.precision.policy import Precision
from npu_bridge.session.precision.rounded_functions import count_float32_operators

_FOLLOWS = "_npu_bridge_precision"  # attribute of a function: the precision that it follows


@contextlib.contextmanager
def apply_policy_to_functions(precision: Precision, policy: Policy) -> Iterator[dict[str, str]]:
    """Applies a policy (`precision.configured` or `precision.low`) to functions that this thread calls in a block.

    Yields a dict that collects the names of these functions, and of the functions that are called in their place.
    """
    called: dict[str, str] = {}

    def replacement_name(name):
        imitation = precision.imitation
        called[name] = name if imitation is None else imitation.rounded_function_name(policy, name)
        return called[name]

    with redirect_calls_in_block(replacement_name):
        if precision.imitation is not None:
            yield called
            return
        before = function_call_settings()
        # An executor may be built in any step: the last batch of an epoch can have another shape.
        with environment.set_variables_temporarily(
            functools.partial(precision.make_rewriter_environment, policy, None)
        ):
            set_function_call_settings(copy_with_changed_config(before, precision.prepare))
            try:
                yield called
            finally:
                set_function_call_settings(before)


def call_under_policy(
    precision: Precision, policy: Policy, function: Callable, *inputs: Any, trains: bool = True
) -> Any:
    """Calls a function under a precision policy; notes whether anything is lowered in the first call that trains."""
    with apply_policy_to_functions(precision, policy) as called:
        results = function(*inputs)

    def count():
        definitions = filter(None, map(eager_function_definition, called))
        nodes = [node for definition in definitions for node in definition.node_def]
        return count_float32_operators(nodes, eager_function_definition)

    if trains:
        precision.note_training_step(policy, None, count, lambda: any(name != other for name, other in called.items()))
    return results


def apply_precision_to_model(model: Any, precision: Precision) -> None:
    """Makes `fit`, `evaluate` and `predict` of a Keras model follow the configured policy; affects nothing else."""
    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        setattr(model, name, _wrap_function_maker(getattr(model, name), precision, "train" in name))


def _wrap_function_maker(make_function: Callable, precision: Precision, is_training: bool) -> Callable:
    """Wraps a Keras method such as `make_train_function`: the function that it makes follows the configured policy."""

    @functools.wraps(make_function)
    def make_function_under_policy(*arguments, **keywords):
        function = make_function(*arguments, **keywords)
        if getattr(function, _FOLLOWS, None) is precision:  # made before: Keras keeps the function
            return function

        def call_with_policy(*inputs):
            return call_under_policy(precision, precision.configured, function, *inputs, trains=is_training)

        setattr(call_with_policy, _FOLLOWS, precision)
        return call_with_policy

    return make_function_under_policy


def lower_functions(precision: Precision) -> None:
    """Makes the functions that this thread calls from now on follow the configured policy.

    Rules of `customize_dtypes` for single operators, or for single inputs of operators, have no effect, because a
    function cannot be inspected before it is built. If no operator is to be lowered, nothing changes.
    """
    if precision.has_rules_for_single_ops:
        say_once(
            logging.WARNING,
            "customize_dtypes: in functions, only rules that give an operator type a single dtype have an effect. "
            "Expected OpType::TYPE rules; got rules for operator names, or with different dtypes for inputs and "
            "outputs. Use modify_mixlist in place of these rules.",
        )
    if precision.low_dtype is None:
        return
    if precision.imitation is not None:
        redirect_calls(functools.partial(precision.imitation.rounded_function_name, precision.configured))
        return
    for name, text in precision.make_rewriter_environment(precision.configured, None).items():
        environment.write_variable(name, text)
    set_function_call_settings(copy_with_changed_config(function_call_settings(), precision.prepare))
