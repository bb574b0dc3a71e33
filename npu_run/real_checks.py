"""Calls the checks of documented constructors and functions with the values that a script writes out.

Nothing is imitated: values are refused by the code that a run calls, in the same words. A value that the text does not
show is an `Unknown`, which ends a check that needs it. Only code that checks its arguments is called: no ranks start,
and no file is made.
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

from npu_bridge.base.errors import did_you_mean, shown
from npu_bridge.options.catalogue import OPTIONS
from npu_bridge.options.kinds import Helper
from npu_bridge.options.rules import HELPER_RULES, RULES, DirectoryError, Settings
from npu_bridge.options.table import IN_OBJECT, RUN_CONFIG
from npu_run.literals import Arguments, Undecided, Unknown, is_known

_OURS = ("npu_bridge.", "npu_device.", "hccl.")
# Modules whose calls only check their arguments; for calls of other modules, only the signature is checked.
_CHECK_ALONE = re.compile(
    r"npu_bridge\.(hccl\.hccl_ops|operators\.\w+|amp\.(apex|loss_scale|groups|configuration)|boost\.config|"
    r"gradients\.(freeze_schedule|stage|sync|stages\.\w+)|optimizers\.(choose|rules\.\w+|keras|keras_legacy|tf1)|"
    r"estimator\.(profiler|npu_(\w+_)?ops)|estimator\.npu\.(checks|model_fn|npu_callbacks|npu_config|npu_dynamic_rnn|"
    r"npu_estimator|npu_hook|npu_loss_scale_\w+|npu_optimizer|npu_scope)|reporting\.\w+_hook|"
    r"session\.(average_metrics|best_checkpoint|end_together\w*))|hccl\.split\.api|npu_device\.(ops|train\.\w+)"
)
_SCOPES = "npu_bridge.estimator.npu.npu_scope"
_CHECK_ALONE_TOO = ("npu_hooks_append", "npu_keras_optimizer", "npu_tf_optimizer", "set_npu_loop_size")
# Arguments whose legal values depend on the ranks of the job, with a legal value for a single rank.
_OF_RANKS: dict[str, Any] = {"group": "hccl_world_group", "rank": 0, "rank_size": 1, "root_rank": 0}
# Arguments about which a single rank knows nothing, and folders, which are not made here.
_NOT_KNOWN_HERE = re.compile(
    r"dest_rank|src_rank|send_\w+|recv_\w+|\w*_(dir|path)|folder|path|job_start_file|warm_start_from"
)
_OPTIMIZERS = re.compile(
    r"(tensorflow|keras|npu_bridge\.npu_init\.tf)\.(\w+\.)*(train\.\w+Optimizer|optimizers\.(legacy\.)?[A-Z]\w+)"
)
AROUND = ".LossScaleOptimizer"  # of Keras; it can wrap an optimizer of this package
_REFUSALS = (TypeError, ValueError, NotImplementedError)


@contextlib.contextmanager
def as_in_a_run(era: int) -> Iterator[None]:
    """Lets checks run as in a script of TensorFlow 1 or 2; prints no warnings, and leaves no variables behind."""
    before, variables = logging.root.manager.disable, dict(os.environ)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            import tensorflow as tf

            from npu_bridge.collective import groups
            from npu_bridge.collective.fragments import SplitStrategies

            here = groups.of_this_process()
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
def find(name: str) -> Any:
    """Returns the object with a dotted name of this package; None if it cannot be found or imported."""
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


def missing_in(name: str) -> Exception | None:
    """Returns the error for a name that its module of this package lacks, with the nearest name; else None."""
    above, _, leaf = name.rpartition(".")
    module = find(above) if above else None
    if not inspect.ismodule(module) or not f"{module.__name__}.".startswith(_OURS) or find(name) is not None:
        return None
    try:
        getattr(module, leaf)
    except AttributeError as error:
        return AttributeError(f"{error}. {did_you_mean(leaf, dir(module), '')}".rstrip())
    except Exception:  # a package can raise anything while it is imported
        return None
    return None


def make(name: str, arguments: Arguments) -> Any:
    """Returns the result of a call in the text, as an argument of another call; an `Unknown` if it cannot be made."""
    try:
        if _OPTIMIZERS.fullmatch(name):
            return _some_optimizer(find_of_tensorflow(name))
        if name == "npu_device.global_options":
            return type(find(name)())()  # a separate object, which this process ignores
        function = find_of_tensorflow(name) if name.endswith(AROUND) else find(name) if name.startswith(_OURS) else None
        if function is None or not _is_checked(function) or arguments.is_open:
            return Unknown()
        bound = _of_any_job(inspect.signature(function).bind(*arguments.positional, **arguments.named))
        return function(*bound.args, **bound.kwargs)
    except (Exception, Undecided):
        return Unknown()


def find_of_tensorflow(name: str) -> Any:
    """Returns the object with a dotted name of TensorFlow or Keras; None without one."""
    import tensorflow as tf

    if name.startswith("keras."):
        return find(name)
    if name.startswith("tensorflow.") and tf.executing_eagerly():
        return find(name)
    short = name.removeprefix("npu_bridge.npu_init.tf.").removeprefix("tensorflow.").removeprefix("compat.v1.")
    return find(f"tensorflow.compat.v1.{short}")


def _some_optimizer(kind: Any) -> Any:
    """Makes an optimizer of a class, with any rate: wrappers only check the class."""
    try:
        return kind(0.1)
    except TypeError:
        return kind(0.1, 0.9)


def refusal_of(function: Callable[..., Any], arguments: Arguments) -> Exception | None:
    """Returns the error of a call if all values that the text leaves open lead to it; None if the call can work."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    positional, named, is_open = arguments
    try:
        bound = (signature.bind_partial if is_open else signature.bind)(*positional, **named)
    except TypeError:
        return call_alone(function, *positional, **named)  # it raises before it does anything
    if not _is_checked(function):
        return None
    if getattr(function, "_declared_as", None):
        return _refusal_of_config(function, dict(bound.arguments), is_open)
    return _refusal_of_call(function, _of_any_job(bound), is_open)


def call_alone(function: Callable[..., Any], *positional: Any, **named: Any) -> Exception | None:
    """Calls a function; returns its refusal, or None if it works, needs an unknown value, or fails otherwise."""
    try:
        made = function(*positional, **named)
        if getattr(function, "__module__", None) == _SCOPES:
            with made:  # checks its arguments on entry
                pass
    except _REFUSALS as error:
        return None if isinstance(error.__cause__, (DirectoryError, OSError)) else error  # the script can still make it
    except (Exception, Undecided):
        return None
    return None


def broken_rules(settings: Settings, unknown: Mapping[str, Any], rules: tuple = RULES) -> Iterator[Exception]:
    """Yields the errors of rules between options that hold for any values of the `unknown` ones."""
    values = {**settings.values, **unknown}
    settings = settings._replace(values=values, given=_Given(settings.given.difference(unknown), unknown))
    yield from filter(None, (call_alone(rule, settings) for rule in rules))


class _Given(frozenset):
    """The names of given options; a question about one that the text leaves open raises `Undecided`."""

    def __new__(cls, names, unknown):
        given = super().__new__(cls, names)
        given.unknown = frozenset(unknown)
        return given

    def __contains__(self, name):
        if name in self.unknown:
            raise Undecided(name)
        return super().__contains__(name)


def _is_checked(function: Any) -> bool:
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
    if name.endswith("LossScaleOptimizer") and "keras" in module.partition(".")[0]:
        return True
    return _CHECK_ALONE.fullmatch(module) is not None or (name in _CHECK_ALONE_TOO and module.startswith(_OURS))


def _of_any_job(given: inspect.BoundArguments) -> inspect.BoundArguments:
    """Replaces arguments that can only be checked in a job of several ranks, or with its folders."""
    result: Any = {}
    for name, value in given.arguments.items():
        of_one = _OF_RANKS.get(name)
        if of_one is not None and type(value) is type(of_one):
            value = of_one if type(value) is str or value >= (name == "rank_size") else value
        elif _NOT_KNOWN_HERE.fullmatch(name):
            value = Unknown()
        result[name] = value
    return inspect.BoundArguments(given.signature, result)


def _refusal_of_call(function: Any, given: inspect.BoundArguments, is_open: bool) -> Exception | None:
    parameters = given.signature.parameters.values()
    error = call_alone(function, *given.args, **given.kwargs)
    more = next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), "")
    named = {**given.arguments, **given.arguments.get(more, {})}
    known = {name: value for name, value in named.items() if is_known(value)}
    is_sure = not is_open and len(known) == len(named)
    if error is not None and (is_sure or isinstance(error, NotImplementedError) or _blames(error, known)):
        return error
    plain = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    needed = [each.name for each in parameters if each.default is each.empty and each.name in plain]
    for name, value in () if is_sure else known.items():  # one by one: another argument can hide the error
        error = call_alone(function, **{**{each: Unknown() for each in needed}, name: value}) if name != more else None
        if error is not None and _blames(error, {name: value}):
            return error
    return None


def _blames(error: Exception, known: Mapping[str, Any]) -> bool:
    """Returns whether a message names one of these arguments with its value, so that others do not matter."""
    text = str(error)
    for name, value in known.items():
        got = (f"got {words}" for words in (shown(value), repr(value), f"{name}={value!r}"))
        if f"unexpected keyword argument {name!r}" in text or (name in text and any(words in text for words in got)):
            return True
    return False


def _refusal_of_config(cls: Any, given: dict[str, Any], is_open: bool) -> Exception | None:
    """Returns the refusal of a configuration object, whose options are checked one by one."""
    owner, known = cls._declared_as, {name: value for name, value in given.items() if is_known(value)}
    if not is_open and len(known) == len(given):
        return call_alone(cls, **given)
    for name, value in known.items():
        if (error := call_alone(OPTIONS[name].check, value, IN_OBJECT)) is not None:
            return error
    values = {option.name: known.get(option.name, option.default) for option in OPTIONS.of(owner)}
    from npu_bridge.options.construction import check_run_config
    from npu_bridge.options.reading import settings_of

    if owner == RUN_CONFIG:
        error = call_alone(check_run_config, values)
        if error is not None and getattr(error, "option", None) in known:
            return error
    plain, unknown = _as_plain(
        owner, known, {name for name in values if name not in known and (is_open or name in given)}
    )
    try:
        settings = settings_of(plain, IN_OBJECT, OPTIONS)
    except _REFUSALS:
        return None
    return next(broken_rules(settings, unknown, RULES if owner == RUN_CONFIG else HELPER_RULES.get(owner, ())), None)


def _as_plain(owner: str, known: Mapping[str, Any], hidden: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the known and the unknown options of an object, with those of its helper objects."""
    plain: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    for option in OPTIONS.of(owner):
        name, helper = option.name, known.get(option.name)
        if isinstance(option.kind, Helper):
            inner = OPTIONS.of(option.kind.owner)
            if name in hidden:
                unknown.update({each.name: Unknown() for each in inner if each.is_plain})
            elif helper is not None:
                plain.update({each.name: getattr(helper, each.attribute) for each in inner if each.is_plain})
        elif name == "session_config" and (name in hidden or helper is not None):
            unknown.update({each.name: Unknown() for each in OPTIONS if each.is_plain})
        elif name in hidden and option.is_plain:
            unknown[name] = Unknown()
        elif name in known and option.is_plain:
            plain[name] = known[name]
    return plain, {name: value for name, value in unknown.items() if name not in plain}
