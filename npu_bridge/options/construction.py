"""Makes the constructors of config classes from the option table; checks arguments in the documented order."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, Callable

from npu_bridge.base import environment
from npu_bridge.base.errors import message, option_error, say_once, shortened, shown
from npu_bridge.options.catalogue import OPTIONS
from npu_bridge.options.reading import DEFAULT_CHECKPOINT_STEPS, check_helper_object
from npu_bridge.options.table import IN_OBJECT, RUN_CONFIG

# Parameters of tf.estimator.RunConfig, in the order in which it checks them.
BASE_PARAMETERS = (
    "model_dir",
    "save_summary_steps",
    "save_checkpoints_steps",
    "save_checkpoints_secs",
    "session_config",
    "keep_checkpoint_max",
    "keep_checkpoint_every_n_hours",
    "log_step_count_steps",
    "tf_random_seed",
    "train_distribute",
    "eval_distribute",
)


def declare_constructor(owner: str) -> Callable[[type], type]:
    """Returns a class decorator that gives a config class the constructor that its options describe.

    The constructor calls `_set_up(values)` of the class with the bound values. Its signature and the `Args` of the
    class docstring come from the table. Keywords that only the base class has are passed on to `_set_up` as keywords.

    Args:
      owner: the owner under which the table lists the options.
    """

    def add_constructor(cls: type) -> type:
        base = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        base_only = {name for name, one in base.items() if one.kind is one.POSITIONAL_OR_KEYWORD} - {"self"}
        base_only.difference_update(option.name for option in OPTIONS.options_of(owner))

        def __init__(self, *args, **kwargs):
            others = {name: kwargs.pop(name) for name in base_only.intersection(kwargs)}
            self._set_up(OPTIONS.bind(owner, args, kwargs), **others)

        __init__.__signature__ = OPTIONS.signature(owner)  # type: ignore[attr-defined]
        __init__.__qualname__ = f"{cls.__qualname__}.__init__"
        __init__.__module__ = cls.__module__
        cls.__init__ = __init__  # type: ignore[misc]
        cls._declared_as = owner  # type: ignore[attr-defined]
        lines = [f"  {o.name}: {o.doc} {_sentence_start(o.expected)}." for o in OPTIONS.options_of(owner)]
        summary, title, errors = (cls.__doc__ or "").rstrip().partition("Raises:")
        cls.__doc__ = "\n    ".join([f"{summary.rstrip()}\n", "Args:", *lines, title + errors, ""])
        return cls

    return add_constructor


class DeclaredConfig:
    """A base of the helper config classes, which checks the values and then stores them as attributes."""

    _declared_as = ""

    def _set_up(self, values: Mapping[str, Any]) -> None:
        check_helper_object(self._declared_as, values)
        for option in OPTIONS.options_of(self._declared_as):
            setattr(self, option.attribute, values[option.name])

    def __repr__(self) -> str:
        return format_call(self)


def format_call(config: Any, **defaults: Any) -> str:
    """Returns the call that makes a config object, with only the values that differ from the defaults.

    Args:
      config: an object of a class that `declare_constructor` decorates.
      **defaults: default values that differ from those of the table.
    """
    parts = []
    for name, value in changed_values(config, **defaults).items():
        text = repr(value)  # the repr of a protobuf message has several lines
        parts.append(f"{name}={shortened(' '.join(text.split()), 240) if chr(10) in text else text}")
    return f"{type(config).__name__}({', '.join(parts)})"


def changed_values(config: Any, **defaults: Any) -> dict[str, Any]:
    """Returns, by parameter, the values of a config object that differ from defaults; arguments as in `format_call`."""
    pairs = [(option, getattr(config, option.attribute)) for option in OPTIONS.options_of(config._declared_as)]
    return {o.name: value for o, value in pairs if value != defaults.get(o.name, o.default)}


def check_run_config(values: Mapping[str, Any]) -> None:
    """Checks the values given to an NPURunConfig, in the documented order; combinations of options are checked later.

    Raises:
      TypeError, ValueError: the first check that fails.
    """

    def check_options(*names: str, only_type: bool = False) -> None:
        for name in names:
            OPTIONS[name].check(values[name], IN_OBJECT, only_type=only_type)

    check_options("iterations_per_loop", "mix_compile_mode")
    if values["mix_compile_mode"] and values["iterations_per_loop"] != 1:
        raise _conflict_error(
            "iterations_per_loop", values, "does not go with mix_compile_mode=True", "1", "Set it to 1."
        )
    check_options("jit_compile", only_type=True)
    _check_cluster(values)
    check_options("dump_config", "horovod_mode", "graph_run_mode", "enable_exception_dump")
    check_options("dynamic_input_config", "experimental_config")
    check_options(*BASE_PARAMETERS)
    if values["save_checkpoints_steps"] is not None and values["save_checkpoints_secs"] is not None:
        raise _conflict_error(
            "save_checkpoints_secs",
            values,
            "is set together with save_checkpoints_steps",
            "save_checkpoints_secs=None",
            "Leave one of the two out.",
        )
    check_options(*(option.name for option in OPTIONS.options_of(RUN_CONFIG)))


def _check_cluster(values: Mapping[str, Any]) -> None:
    """Checks that a cluster in TF_CONFIG, a parameter-server strategy and mix_compile_mode are set together."""
    cluster = environment.read_tf_config().get("cluster")
    if values["distribute"] is not None:
        OPTIONS["distribute"].check(values["distribute"], IN_OBJECT)
    if bool(cluster) != (values["distribute"] is not None):
        problem = f"does not fit TF_CONFIG, which describes {'a' if cluster else 'no'} cluster"
        expected = "a ParameterServerStrategy" if cluster else "None"
        left = " Another launcher may have left TF_CONFIG: unset it (env -u TF_CONFIG)." if cluster else ""
        raise _conflict_error("distribute", values, problem, expected, f"Set both, or neither.{left}")
    if cluster and not values["mix_compile_mode"]:
        raise _conflict_error(
            "mix_compile_mode", values, "is off although TF_CONFIG describes a cluster", "True", "Set it to True."
        )


def checkpoint_steps(values: Mapping[str, Any]) -> Any:
    """Returns the `save_checkpoints_steps` to store: 100 if neither steps nor seconds are given."""
    if values["save_checkpoints_steps"] is None and values["save_checkpoints_secs"] is None:
        return DEFAULT_CHECKPOINT_STEPS
    return values["save_checkpoints_steps"]


def adjusted_defaults(config: Any) -> dict[str, Any]:
    """Returns a dict with the default of `save_checkpoints_steps`, which other values of the NPURunConfig change."""
    secs = OPTIONS["save_checkpoints_secs"].attribute
    given = {"save_checkpoints_steps": None, "save_checkpoints_secs": getattr(config, secs)}
    return {"save_checkpoints_steps": checkpoint_steps(given)}


def warn_about_checkpoint_times(steps: Any, secs: Any, steps_per_loop: int) -> None:
    """Warns once if checkpoints come late because of the training loop, or depend on the clocks of several ranks."""
    if steps and steps % steps_per_loop:
        below = int(steps // steps_per_loop * steps_per_loop)
        fitting = f"{below} or {below + steps_per_loop}" if below else f"{steps_per_loop}"
        problem = "save_checkpoints_steps does not fit the training loop, so checkpoints come late"
        expected = f"a multiple of iterations_per_loop={steps_per_loop}"
        fix = f"Use {fitting}, or set iterations_per_loop=1."
        say_once(logging.WARNING, message(RUN_CONFIG, problem, expected, f"save_checkpoints_steps={steps}", fix))
    placed = environment.launcher_placement()
    if secs and placed and placed.size > 1:
        problem = "save_checkpoints_secs is not meant for several ranks, whose clocks differ"
        fix = "Use save_checkpoints_steps."
        say_once(logging.WARNING, message(RUN_CONFIG, problem, "None", f"save_checkpoints_secs={secs}", fix))


def _conflict_error(name: str, values: Mapping[str, Any], problem: str, expected: str, fix: str) -> Exception:
    return option_error(
        ValueError, RUN_CONFIG, name, f"{name} {problem}", expected, f"{name}={shown(values[name])}", fix
    )


def _sentence_start(text: str) -> str:
    return text[:1].upper() + text[1:]
