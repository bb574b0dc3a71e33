"""Applies mixed precision to `tf.function` and compiled Keras models, in eager execution.

TensorFlow builds the executor of a function when it is first called with new settings, which are those of the calling
thread. The rewriter reads its lists from the environment at that moment. If a dtype is imitated, rounded copies of
functions are called in their place.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any, Callable

from npu_bridge.base import environment
from npu_bridge.base.errors import say_once
from npu_bridge.base.tf_internals.functions import rename_calls, renamed_calls
from npu_bridge.base.tf_internals.sessions import set_settings_of_functions, settings_of_functions, with_config
from npu_bridge.session.precision import executed
from npu_bridge.session.precision.modes import Policy
from npu_bridge.session.precision.policy import Precision

_FOLLOWS = "_npu_bridge_precision"  # of a function, the precision it follows


@contextlib.contextmanager
def low_precision(precision: Precision, policy: Policy) -> Iterator[None]:
    """Applies a policy, `configured` or `low`, to the functions that this thread calls in a block."""
    if precision.imitation is not None:
        with renamed_calls(functools.partial(precision.imitation.rename, policy)):
            yield
        return
    before = settings_of_functions()
    # An executor may be built in any step: the last batch of an epoch can have another shape.
    with environment.temporarily(functools.partial(precision.variables, policy, None)):
        set_settings_of_functions(with_config(before, precision.prepare))
        try:
            yield
        finally:
            set_settings_of_functions(before)


def call_low(precision: Precision, policy: Policy, function: Callable, *inputs: Any, trains: bool = True) -> Any:
    """Calls a function under a policy of the training; counts the lowered operators of the first one that trains."""
    with low_precision(precision, policy):
        if not trains or not precision.is_to_be_asked(policy):
            precision.tell_plan()
            return function(*inputs)
        if precision.imitation is not None:
            results = function(*inputs)
            precision.note_executed(policy, precision.imitation.count_called())
            return results
        with executed.asked_call() as answer:
            results = function(*inputs)
        precision.note_executed(policy, answer.count(policy.low_dtype))
        return results


def follow(model: Any, precision: Precision) -> None:
    """Makes `fit`, `evaluate` and `predict` of this Keras model, and nothing else, follow the configured policy."""
    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        setattr(model, name, _making_low(getattr(model, name), precision, "train" in name))


def _making_low(make: Callable, precision: Precision, trains: bool) -> Callable:
    """Wraps a method of Keras that makes functions, so that their calls follow the configured policy."""

    @functools.wraps(make)
    def made(*arguments, **keywords):
        function = make(*arguments, **keywords)
        if getattr(function, _FOLLOWS, None) is precision:  # made before: Keras keeps the function
            return function

        def low(*inputs):
            return call_low(precision, precision.configured, function, *inputs, trains=trains)

        setattr(low, _FOLLOWS, precision)
        return low

    return made


def lower_functions(precision: Precision) -> None:
    """Makes the functions that this thread calls from now on follow the configured policy.

    Rules for single operators, or for single inputs to round (`customize_dtypes`), have no effect: functions are not
    seen before they are built. If nothing is lowered, nothing changes.
    """
    if precision.asks_for_single_operators:
        say_once(
            logging.WARNING,
            "customize_dtypes: in functions only rules for an operator type with one dtype have an effect. Expected "
            "OpType::TYPE rules; got names, or inputs and outputs that differ. Use modify_mixlist for the others.",
        )
    if precision.low_dtype is None:
        return
    if precision.imitation is not None:
        rename_calls(functools.partial(precision.imitation.rename, precision.configured))
        return
    for name, text in precision.variables(precision.configured, None).items():
        environment.write_variable(name, text)
    set_settings_of_functions(with_config(settings_of_functions(), precision.prepare))
