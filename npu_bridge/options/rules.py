"""Checks combinations of options; each rule raises an error, warns, or corrects a value."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any, Callable, NamedTuple

from npu_bridge.base.errors import message, option_error, say_once, shown
from npu_bridge.options import grammar
from npu_bridge.options.catalogue import OPTIONS
from npu_bridge.options.table import DUMP, EXPERIMENTAL, PROFILING, OptionSource
from npu_bridge.options.table_precision import MIXED_PRECISION_MODES

DEFAULT_PROFILING_OPTIONS = (
    '{"output":"./","training_trace":"on","task_time":"on","hccl":"on","aicpu":"on",'
    '"aic_metrics":"PipeUtilization","msproftx":"off"}'
)
_ACCELERATED_FROM = ("allow_fp32_to_fp16", "must_keep_origin_dtype")
_DYNAMIC_TRIO = ("input_shape", "dynamic_dims", "dynamic_node_type")


class DirectoryError(ValueError):
    """Raised for a directory that does not exist or cannot be used; other code might still create the directory."""


class Settings(NamedTuple):
    """The input of a rule.

    Attributes:
      values: plain values by option name; rules that correct a value change it here.
      given: names of the options that were set; the others have the NPU stack's defaults.
      place: the place where the options were set.
    """

    values: dict[str, Any]
    given: frozenset[str]
    place: OptionSource

    def make_error(self, name: str, problem: str, expected: str, fix: str) -> Exception:
        """Returns a ValueError about option `name`; `{}` in `problem` stands for the name in the user's spelling."""
        where, *words = self._message_parts(name, problem, expected, fix)
        return option_error(ValueError, where, name, *words)

    def warn(self, name: str, problem: str, expected: str, fix: str) -> None:
        """Logs the message of `make_error` as a warning, once."""
        say_once(logging.WARNING, message(*self._message_parts(name, problem, expected, fix)))

    def _message_parts(self, name: str, problem: str, expected: str, fix: str) -> tuple[str, str, str, str, str]:
        option = OPTIONS[name]
        problem = problem.format(self.place.spelling(option))
        return self.place.holder_of(option), problem, expected, shown(self.values[name]), fix

    def check_one_of(self, name: str, choices: Iterable[str]) -> None:
        """Raises ValueError if the option's value is not one of `choices`."""
        choices = tuple(choices)
        if self.values[name] not in choices:
            listed = " or ".join(repr(choice) for choice in choices)
            raise self.make_error(name, "{} is not an allowed value", listed, "Use one of these.")

    def check_parses(self, name: str, parse: Callable[[str], Any]) -> None:
        """Raises ValueError if `parse` rejects the option's text."""
        try:
            parse(self.values[name])
        except ValueError as reason:
            raise self.make_error(
                name, "{} is not usable", OPTIONS[name].expected, f"Correct it: {reason}."
            ) from reason


def check_only_one_precision_mode(settings: Settings) -> None:
    """Refuses `precision_mode` together with `precision_mode_v2`."""
    if settings.values["precision_mode"] is not None and settings.values["precision_mode_v2"] is not None:
        spelling = settings.place.spelling(OPTIONS["precision_mode"])
        problem = f"{{}} is set together with {spelling}={settings.values['precision_mode']!r}"
        raise settings.make_error("precision_mode_v2", problem, "only one of the two", "Keep precision_mode_v2.")


def check_mixlist_has_mixed_precision(settings: Settings) -> None:
    """Refuses `modify_mixlist` without mixed precision, as only mixed precision has lists that can be modified."""
    if settings.values["modify_mixlist"] is None or _requested_precision_mode(settings) in MIXED_PRECISION_MODES:
        return
    problem = f"{{}} needs mixed precision, but the precision mode is {_requested_precision_mode(settings)!r}"
    fix = "Set precision_mode_v2='mixed_float16' or 'mixed_bfloat16', or leave modify_mixlist out."
    raise settings.make_error("modify_mixlist", problem, "no mixlist, or a mixed precision mode", fix)


def check_acceleration_fits_precision(settings: Settings) -> None:
    """Refuses `accelerate_train_mode` with a precision mode that already lowers the precision."""
    if not settings.values["accelerate_train_mode"]:
        return
    v2, v1 = settings.values["precision_mode_v2"], settings.values["precision_mode"]
    fits = v2 == "origin" if v2 is not None else v1 is None or v1 in _ACCELERATED_FROM
    if not fits:
        raise settings.make_error(
            "accelerate_train_mode",
            f"{{}} does not go with the precision mode {_requested_precision_mode(settings)!r}",
            "no acceleration, or precision_mode_v2='origin', or precision_mode="
            + " or ".join(repr(mode) for mode in _ACCELERATED_FROM),
            "Leave both precision modes out, or use one of these.",
        )


def _requested_precision_mode(settings: Settings) -> str | None:
    return settings.values["precision_mode_v2"] or settings.values["precision_mode"]


def check_dump_options(settings: Settings) -> None:
    """Refuses a dump without a directory, or with both of its switches on."""
    dumps, debugs = settings.values["enable_dump"], settings.values["enable_dump_debug"]
    if dumps and debugs:
        raise settings.make_error(
            "enable_dump_debug", "{} is set together with enable_dump", "False", "Leave one of the two out."
        )
    if dumps or debugs:
        if settings.values["dump_path"] is None:
            raise settings.make_error(
                "dump_path",
                "{} is missing although a dump is switched on",
                "an existing directory",
                "Give a directory.",
            )
    # Checked while the dump is off, too, so that errors show early. The directory can be created later.
    if settings.values["dump_step"] is not None:
        settings.check_parses("dump_step", grammar.parse_dump_step)
    settings.check_one_of("dump_mode", ("input", "output", "all"))
    settings.check_one_of("dump_debug_mode", ("aicore_overflow", "atomic_overflow", "all"))


def check_dump_directory(settings: Settings) -> None:
    """Checks the dump directory when a training uses it: a script can make a `DumpConfig` that no training uses."""
    if settings.values["enable_dump"] or settings.values["enable_dump_debug"]:
        settings.check_parses("dump_path", resolve_usable_directory)


def complete_profiling(settings: Settings) -> None:
    """If profiling is on, replaces missing profiling options by the defaults, and checks the options."""
    if not settings.values["enable_profiling"]:
        return
    if settings.values["profiling_options"] is None:
        settings.values["profiling_options"] = DEFAULT_PROFILING_OPTIONS
    settings.check_parses("profiling_options", grammar.parse_profiling_options)


def check_compile_cache_exists(settings: Settings) -> None:
    """Refuses a cache directory for compiled graphs that does not exist."""
    if settings.values["graph_compiler_cache_dir"] is not None:
        settings.check_parses("graph_compiler_cache_dir", resolve_usable_directory)


def check_implementation_types_have_mode(settings: Settings) -> None:
    """Refuses `optypelist_for_implmode` without `op_select_implmode`, the mode of these operator types."""
    if settings.values["optypelist_for_implmode"] is not None and settings.values["op_select_implmode"] is None:
        fix = "Set op_select_implmode='high_precision' or 'high_performance', or leave optypelist_for_implmode out."
        raise settings.make_error(
            "optypelist_for_implmode", "{} is set without op_select_implmode", "both or neither", fix
        )


def check_only_one_compression(settings: Settings) -> None:
    """Refuses `enable_compress_weight` and `compress_weight_conf` together, whatever their values."""
    if "enable_compress_weight" in settings.given and "compress_weight_conf" in settings.given:
        raise settings.make_error(
            "compress_weight_conf",
            "{} cannot go with enable_compress_weight, which is "
            + ("set, too" if settings.place.is_session else "set in every NPURunConfig"),
            "None",
            "Leave it out.",
        )


def check_dynamic_dims(settings: Settings) -> None:
    """Refuses an incomplete set of the three options for dynamic dimensions, and options that exclude the set."""
    set_names = [name for name in _DYNAMIC_TRIO if name in settings.given]
    if set_names and len(set_names) < len(_DYNAMIC_TRIO):
        missing = [name for name in _DYNAMIC_TRIO if name not in settings.given]
        expected, fix = f"all of {', '.join(_DYNAMIC_TRIO)}, or none", f"Set {', '.join(missing)} too."
        raise settings.make_error(set_names[0], f"{{}} is set without {', '.join(missing)}", expected, fix)
    if settings.values["compile_hybrid_mode"] == 1 and (not set_names or settings.values["dynamic_node_type"] != 1):
        problem = f"{{}} does not go with dynamic_node_type={settings.values['dynamic_node_type']}"
        expected = f"0, or {', '.join(_DYNAMIC_TRIO)} with dynamic_node_type=1"
        raise settings.make_error("compile_hybrid_mode", problem, expected, "Set compile_hybrid_mode=0.")
    if not set_names:
        return
    _check_profiles_fit_shapes(settings)
    for excluded in ("mix_compile_mode", "compile_dynamic_mode"):
        if settings.values.get(excluded):
            raise settings.make_error(excluded, "{} does not go with dynamic_dims", "False", "Leave one of them out.")
    if settings.values.get("dynamic_inputs_shape_range") is not None:
        settings.warn(
            "dynamic_inputs_shape_range",
            "{} is ignored because dynamic_dims is set",
            "None",
            "Leave one of the two out.",
        )
        settings.values["dynamic_inputs_shape_range"] = None


def _check_profiles_fit_shapes(settings: Settings) -> None:
    shapes = grammar.parse_input_shape(settings.values["input_shape"])
    dynamic = sum(dim < 0 for dims in shapes.values() for dim in dims)
    profile = grammar.parse_dynamic_dims(settings.values["dynamic_dims"])[0]
    if len(profile) != dynamic:
        problem = f"{{}} has profiles of {len(profile)} dimensions, but input_shape has {dynamic} dynamic dimensions"
        fix = "Write one value for each -1 of input_shape."
        raise settings.make_error("dynamic_dims", problem, f"profiles of {dynamic}", fix)


def check_dynamic_input(settings: Settings) -> None:
    """For dynamic inputs, checks the execution mode; lazy recompilation needs one step per run."""
    if not settings.values["dynamic_input"]:
        return
    settings.check_one_of("dynamic_graph_execute_mode", ("dynamic_execute", "lazy_recompile"))
    if settings.values["dynamic_graph_execute_mode"] == "lazy_recompile" and settings.values["iterations_per_loop"] > 1:
        problem = "{} does not go with dynamic_graph_execute_mode='lazy_recompile'"
        fix = "Set iterations_per_loop=1, or dynamic_graph_execute_mode='dynamic_execute'."
        raise settings.make_error("iterations_per_loop", problem, "1", fix)


def check_mix_compile_mode(settings: Settings) -> None:
    """Checks that `mix_compile_mode` has one step per run; checks options that need `mix_compile_mode`."""
    if settings.values["mix_compile_mode"]:
        if settings.values["iterations_per_loop"] != 1:
            raise settings.make_error(
                "iterations_per_loop", "{} does not go with mix_compile_mode=True", "1", "Set it to 1."
            )
        return
    if settings.values["in_out_pair"] is not None:
        raise settings.make_error(
            "in_out_pair", "{} is set without mix_compile_mode", "no value", "Set mix_compile_mode=True."
        )
    if settings.values["variable_placement"] == "Host":
        settings.warn(
            "variable_placement", "{} is meant for mix_compile_mode=True", "'Device'", "Set mix_compile_mode=True too."
        )


def warn_of_unused_shape_generalisation(settings: Settings) -> None:
    """Warns about `shape_generalization_mode` if static shapes are not compiled, so that the mode has no effect."""
    if settings.values["shape_generalization_mode"] == "STRICT":
        return
    if settings.values["jit_compile"] != "true" or settings.values["compile_dynamic_mode"]:
        expected = "'STRICT', or jit_compile='true' with compile_dynamic_mode=False"
        settings.warn(
            "shape_generalization_mode",
            "{} has no effect",
            expected,
            "Set jit_compile='true', or leave shape_generalization_mode out.",
        )


def check_tuning_directory(settings: Settings) -> None:
    """Checks the tuning directory if tuning is on."""
    if settings.values["aoe_mode"] is not None:
        settings.check_parses("work_path", resolve_usable_directory)


def set_small_channels_for_inference(settings: Settings) -> None:
    """Sets `enable_small_channel=1` for `graph_run_mode=0`."""
    if settings.values["graph_run_mode"] == 0:
        settings.values["enable_small_channel"] = 1


def resolve_usable_directory(path: str) -> str:
    """Returns the real path of an existing directory that can be read and written.

    Raises:
      DirectoryError: (a ValueError) the path does not exist, is not a directory, or cannot be read and written.
    """
    real = os.path.realpath(path)
    if not os.path.isdir(real):
        raise DirectoryError(f"{path!r} is not an existing directory")
    if not os.access(real, os.R_OK | os.W_OK):
        raise DirectoryError(f"{path!r} cannot be read and written")
    return real


# Rules within a single helper object: its constructor runs them, so that the error is raised there.
HELPER_RULES = {
    DUMP: (check_dump_options,),
    PROFILING: (complete_profiling,),
    EXPERIMENTAL: (check_compile_cache_exists,),
}
RULES = (
    check_only_one_precision_mode,
    check_mixlist_has_mixed_precision,
    check_acceleration_fits_precision,
    check_dump_options,
    check_dump_directory,
    complete_profiling,
    check_compile_cache_exists,
    check_implementation_types_have_mode,
    check_only_one_compression,
    check_dynamic_dims,
    check_dynamic_input,
    check_mix_compile_mode,
    warn_of_unused_shape_generalisation,
    check_tuning_directory,
    set_small_channels_for_inference,
)
