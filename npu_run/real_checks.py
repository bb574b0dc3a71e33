"""Checks the arguments in a script's text by calling the documented constructors and functions with them.

The errors are those that a run of the script would raise, because the same code raises them. A value that the text
does not show is an `UnknownValue`, which ends a check that needs it. Only code that checks its arguments is called: no
ranks start, and no file is made.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Callable

from npu_bridge.base.errors import shown
from npu_bridge.options.catalogue import OPTIONS
from npu_bridge.options.kinds import HelperObject
from npu_bridge.options.rules import HELPER_RULES, RULES, DirectoryError, Settings
from npu_bridge.options.table import IN_OBJECT, RUN_CONFIG
from npu_run.literals import CallArguments, UndecidedError, UnknownValue, is_known

OURS = ("npu_bridge.", "npu_device.", "hccl.")  # how names of this package begin
# Modules whose calls only check their arguments; for calls of other modules, only the signature is checked.
_CHECKING_MODULES = re.compile(
    r"npu_bridge\.(hccl\.hccl_ops|operators\.\w+|amp\.(apex|loss_scale|groups|configuration)|boost\.config|"
    r"gradients\.(checkpoints\.sync|freeze_schedule|stage|stages\.\w+)|"
    r"optimizers\.(choose|rules\.\w+|keras|keras_legacy|tf1)|"
    r"estimator\.(profiler|npu_(\w+_)?ops)|estimator\.npu\.(checks|model_fn|npu_callbacks|npu_config|npu_dynamic_rnn|"
    r"npu_estimator|npu_hook|npu_loss_scale_\w+|npu_optimizer|npu_scope)|reporting\.\w+_hook|"
    r"session\.(average_metrics|best_checkpoint|end_together\w*))|hccl\.split\.api|npu_device\.(ops|train\.\w+)"
)
_SCOPES = "npu_bridge.estimator.npu.npu_scope"
_CHECKING_FUNCTIONS = ("npu_hooks_append", "npu_keras_optimizer", "npu_tf_optimizer", "set_npu_loop_size")
# Arguments whose legal values depend on the ranks of the job, with a legal value for a single rank.
_SINGLE_RANK_VALUES: dict[str, Any] = {"group": "hccl_world_group", "rank": 0, "rank_size": 1, "root_rank": 0}
# Arguments that a single process cannot check: other ranks, and folders, which these checks do not make.
_JOB_ARGUMENTS = re.compile(
    r"dest_rank|src_rank|send_\w+|recv_\w+|\w*_(dir|path)|folder|path|job_start_file|warm_start_from"
)
_OPTIMIZERS = re.compile(
    r"(tensorflow|keras|npu_bridge\.npu_init\.tf)\.(\w+\.)*(train\.\w+Optimizer|optimizers\.(legacy\.)?[A-Z]\w+)"
)
WRAPPER_SUFFIX = ".LossScaleOptimizer"  # of Keras; it can wrap an optimizer of this package
_REFUSALS = (TypeError, ValueError, NotImplementedError)


@contextlib.contextmanager
def simulated_run(era: int) -> Iterator[None]:
    """Runs checks in the graph or eager mode of TensorFlow 1 or 2, without warnings; then restores `os.environ`."""
    before, variables = logging.root.manager.disable, dict(os.environ)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            import tensorflow as tf

            from npu_bridge.collective import groups
            from npu_bridge.collective.fragments import SplitStrategies

            here = groups.groups_of_process()
            strategies, here.strategies = here.strategies, SplitStrategies()
            try:
                with tf.Graph().as_default() if era == 1 else contextlib.nullcontext():
                    yield
            finally:
                here.strategies = strategies
    finally:
        logging.disable(before)
        os.environ.clear()
        os.environ.update(variables)


@functools.cache
def import_object(name: str) -> Any:
    """Imports the object with a dotted name, such as "npu_bridge.hccl.hccl_ops.allreduce"; None if that fails."""
    first, *rest = name.split(".")
    try:
        found, place = importlib.import_module(first), first
        for part in rest:
            place = f"{place}.{part}"
            if not hasattr(found, part):
                importlib.import_module(place)
            if inspect.isclass(found) and inspect.isfunction(getattr(found, part)):
                return None  # a method, called without its object
            found = getattr(found, part)
    except Exception:  # a package can raise anything while it is imported
        return None
    return found


def evaluate_call(name: str, arguments: CallArguments) -> Any:
    """Returns the value of a call that is an argument of another call; an `UnknownValue` if it cannot be computed."""
    try:
        if _OPTIMIZERS.fullmatch(name):
            return _make_optimizer(import_from_tensorflow(name))
        if name == "npu_device.global_options":
            return type(import_object(name)())()  # a separate object, which this process ignores
        function = (
            import_from_tensorflow(name)
            if name.endswith(WRAPPER_SUFFIX)
            else import_object(name)
            if name.startswith(OURS)
            else None
        )
        if function is None or not _can_be_checked(function) or arguments.is_open:
            return UnknownValue()
        bound = _replace_job_arguments(inspect.signature(function).bind(*arguments.positional, **arguments.named))
        return function(*bound.args, **bound.kwargs)
    except (Exception, UndecidedError):
        return UnknownValue()


def import_from_tensorflow(name: str) -> Any:
    """Returns the object with a dotted name in TensorFlow or Keras; None if no such object exists."""
    import tensorflow as tf

    if name.startswith("keras."):
        return import_object(name)
    if name.startswith("tensorflow.") and tf.executing_eagerly():
        return import_object(name)
    short = name.removeprefix("npu_bridge.npu_init.tf.").removeprefix("tensorflow.").removeprefix("compat.v1.")
    return import_object(f"tensorflow.compat.v1.{short}")


def _make_optimizer(kind: Any) -> Any:
    """Makes an optimizer of a class with an arbitrary learning rate: wrappers only check the class."""
    try:
        return kind(0.1)
    except TypeError:
        return kind(0.1, 0.9)


def find_call_error(function: Callable[..., Any], arguments: CallArguments) -> Exception | None:
    """Returns the error that a call raises whatever its unknown arguments are; None if the call can work."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    positional, named, is_open = arguments
    try:
        bound = (signature.bind_partial if is_open else signature.bind)(*positional, **named)
    except TypeError:
        return catch_refusal(function, *positional, **named)  # the call fails before the function does anything
    if not _can_be_checked(function):
        return None
    if getattr(function, "_declared_as", None):
        return _find_config_error(function, dict(bound.arguments), is_open)
    return _find_argument_error(function, _replace_job_arguments(bound), is_open)


def catch_refusal(function: Callable[..., Any], *positional: Any, **named: Any) -> Exception | None:
    """Calls a function and returns the error with which it refuses its arguments.

    Returns None if the function works, needs an unknown value, or fails for another reason.
    """
    try:
        made = function(*positional, **named)
        if getattr(function, "__module__", None) == _SCOPES:
            with made:  # checks its arguments on entry
                pass
    except _REFUSALS as error:
        # A folder that is missing now can exist in the run: the script can still make it.
        return None if isinstance(error.__cause__, (DirectoryError, OSError)) else error
    except (Exception, UndecidedError):
        return None
    return None


def find_broken_rules(settings: Settings, unknown: Mapping[str, Any], rules: tuple = RULES) -> Iterator[Exception]:
    """Yields an error for each broken rule between options, if no value of the `unknown` options can fix it."""
    values = {**settings.values, **unknown}
    settings = settings._replace(values=values, given=_GivenOptionNames(settings.given.difference(unknown), unknown))
    yield from filter(None, (catch_refusal(rule, settings) for rule in rules))


class _GivenOptionNames(frozenset):
    """A set of the options that a script gives; `in` raises `UndecidedError` for an option in `unknown`."""

    def __new__(cls, names, unknown):
        given = super().__new__(cls, names)
        given.unknown = frozenset(unknown)
        return given

    def __contains__(self, name):
        if name in self.unknown:
            raise UndecidedError(name)
        return super().__contains__(name)


def _can_be_checked(function: Any) -> bool:
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
    if name.endswith("LossScaleOptimizer") and "keras" in module.partition(".")[0]:
        return True
    return _CHECKING_MODULES.fullmatch(module) is not None or (name in _CHECKING_FUNCTIONS and module.startswith(OURS))


def _replace_job_arguments(bound_arguments: inspect.BoundArguments) -> inspect.BoundArguments:
    """Replaces arguments that only the real job can check (ranks, groups, folders) by samples or `UnknownValue`."""
    result: Any = {}
    for name, value in bound_arguments.arguments.items():
        of_one = _SINGLE_RANK_VALUES.get(name)
        if of_one is not None and type(value) is type(of_one):
            value = of_one if type(value) is str or value >= (name == "rank_size") else value
        elif _JOB_ARGUMENTS.fullmatch(name):
            value = UnknownValue()
        result[name] = value
    return inspect.BoundArguments(bound_arguments.signature, result)


def _find_argument_error(
    function: Any, arguments: inspect.BoundArguments, has_unknown_arguments: bool
) -> Exception | None:
    parameters = arguments.signature.parameters.values()
    error = catch_refusal(function, *arguments.args, **arguments.kwargs)
    more = next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), "")
    named = {**arguments.arguments, **arguments.arguments.get(more, {})}
    known = {name: value for name, value in named.items() if is_known(value)}
    is_sure = not has_unknown_arguments and len(known) == len(named)
    if error is not None and (is_sure or isinstance(error, NotImplementedError) or _mentions_argument(error, known)):
        return error
    plain = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    needed = [each.name for each in parameters if each.default is each.empty and each.name in plain]
    for name, value in () if is_sure else known.items():  # one by one: another argument can hide the error
        if name == more:
            continue
        error = catch_refusal(function, **{**{each: UnknownValue() for each in needed}, name: value})
        if error is not None and _mentions_argument(error, {name: value}):
            return error
    return None


def _mentions_argument(error: Exception, known_arguments: Mapping[str, Any]) -> bool:
    """Returns whether an error message names a known argument with its value: then unknown arguments do not matter."""
    text = str(error)
    for name, value in known_arguments.items():
        got = (f"got {words}" for words in (shown(value), repr(value), f"{name}={value!r}"))
        if f"unexpected keyword argument {name!r}" in text or (name in text and any(words in text for words in got)):
            return True
    return False


def _find_config_error(
    config_class: Any, given_arguments: dict[str, Any], has_unknown_arguments: bool
) -> Exception | None:
    """Returns the error with which a configuration class refuses its options; None if they can work."""
    owner = config_class._declared_as
    known = {name: value for name, value in given_arguments.items() if is_known(value)}
    if not has_unknown_arguments and len(known) == len(given_arguments):
        return catch_refusal(config_class, **given_arguments)
    for name, value in known.items():
        if (error := catch_refusal(OPTIONS[name].check, value, IN_OBJECT)) is not None:
            return error
    values = {option.name: known.get(option.name, option.default) for option in OPTIONS.options_of(owner)}
    from npu_bridge.options.construction import check_run_config
    from npu_bridge.options.reading import collect_settings

    if owner == RUN_CONFIG:
        error = catch_refusal(check_run_config, values)
        if error is not None and getattr(error, "option", None) in known:
            return error
    plain, unknown = _split_options(
        owner,
        known,
        {name for name in values if name not in known and (has_unknown_arguments or name in given_arguments)},
    )
    try:
        settings = collect_settings(plain, IN_OBJECT)
    except _REFUSALS:
        return None
    return next(
        find_broken_rules(settings, unknown, RULES if owner == RUN_CONFIG else HELPER_RULES.get(owner, ())), None
    )


def _split_options(
    owner: str, known_values: Mapping[str, Any], hidden_options: set[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the known and the unknown options of a configuration object and of its helper objects.

    The text shows the values of `known_values`, but not those of `hidden_options`.
    """
    plain: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    for option in OPTIONS.options_of(owner):
        name, helper = option.name, known_values.get(option.name)
        if isinstance(option.kind, HelperObject):
            inner = OPTIONS.options_of(option.kind.owner)
            if name in hidden_options:
                unknown.update({each.name: UnknownValue() for each in inner if each.has_plain_value})
            elif helper is not None:
                plain.update({each.name: getattr(helper, each.attribute) for each in inner if each.has_plain_value})
        elif name == "session_config" and (name in hidden_options or helper is not None):
            unknown.update({each.name: UnknownValue() for each in OPTIONS if each.has_plain_value})
        elif name in hidden_options and option.has_plain_value:
            unknown[name] = UnknownValue()
        elif name in known_values and option.has_plain_value:
            plain[name] = known_values[name]
    return plain, {name: value for name, value in unknown.items() if name not in plain}
