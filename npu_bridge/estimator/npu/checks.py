"""Checks arguments of documented functions; scripts import most of these checks from `util`."""

from __future__ import annotations

import errno
import logging
import os
import random
import string
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import did_you_mean, message, say_once, shown
from npu_bridge.base.tensorflow_start import hide_global_step_warning
from npu_bridge.base.terminal import logger
from npu_bridge.gradients.checkpoints.sync import batches_per_update_in
from npu_bridge.gradients.collections import pipelines_in
from npu_bridge.graph.variables import global_step_of, is_ever_changed
from npu_bridge.options import OPTIONS
from npu_bridge.options.kinds import Boolean, Integer
from npu_bridge.options.rules import resolve_usable_directory
from npu_bridge.options.table import IN_OBJECT
from npu_bridge.session.checkpoints import check_folder_name

_LOG = logger(__name__)
_PROFILING_OPTIONS = ("training_trace", "task_time", "op_trace")
_TPU_KEYWORDS = (
    "batch_axis",
    "embedding_config_spec",
    "eval_batch_size",
    "eval_on_tpu",
    "export_saved_model_api_version",
    "export_to_cpu",
    "export_to_tpu",
    "predict_batch_size",
    "train_batch_size",
    "use_tpu",
)


# Settings that a stock RunConfig and an NPURunConfig have under the same names.
_OF_RUN_CONFIG = (
    "model_dir",
    "tf_random_seed",
    "save_summary_steps",
    "save_checkpoints_steps",
    "save_checkpoints_secs",
    "keep_checkpoint_max",
    "keep_checkpoint_every_n_hours",
    "log_step_count_steps",
    "protocol",
    "experimental_max_worker_delay_secs",
    "session_creation_timeout_secs",
)
_KEPT_OF_RUN_CONFIG = ("session_config", "train_distribute", "eval_distribute", "device_fn")


def describe_npu_config_fix(config: Any) -> str:
    """Returns the fix for a `config` that is no `NPURunConfig`: a call with the settings of the given `RunConfig`."""
    if not isinstance(config, tf.estimator.RunConfig):
        return "Pass config=NPURunConfig(...)."
    usual = tf.estimator.RunConfig()
    given = {name: getattr(config, name) for name in _OF_RUN_CONFIG if getattr(config, name) != getattr(usual, name)}
    texts = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    # These values are too long to write out.
    texts += [f"{name}=config.{name}" for name in _KEPT_OF_RUN_CONFIG if getattr(config, name) is not None]
    return f"Write NPURunConfig({', '.join(texts)})."


def check_not_none(value: Any, name: str) -> None:
    """Checks that a value is given.

    Raises:
      ValueError: the value is None.
    """
    if value is None:
        raise ValueError(f"{name} is missing. Expected a value; got None. Pass a value.")


def check_positive_integer(value: Any, name: str) -> None:
    """Checks that a value is an integer of at least 1.

    Raises:
      TypeError: the value is not an int, or is a bool.
      ValueError: the value is below 1.
    """
    _check_kind_of_value(Integer(1), value, name)


def check_nonnegative_integer(value: Any, name: str) -> None:
    """Checks that a value is an integer of at least 0.

    Raises:
      TypeError: the value is not an int, or is a bool.
      ValueError: the value is below 0.
    """
    _check_kind_of_value(Integer(0), value, name)


def check_bool_type(value: Any, name: str) -> None:
    """Checks that a value is True or False.

    Raises:
      TypeError: the value is not a bool.
    """
    _check_kind_of_value(Boolean(only_bool=True), value, name)


def convert_bool_to_int(value: Any) -> int:
    """Returns 1 for True, 0 for False, and -1 for any other value."""
    return int(value) if isinstance(value, bool) else -1


def format_string(value: str | None, name: str) -> str:
    """Returns a text unchanged, and an empty text for None.

    Raises:
      TypeError: the value is neither text nor None.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{name} has the wrong type. Expected a string or None; got {shown(value)}. Pass a string.")
    return value


def check_profiling_options(profiling_options: Iterable[str] = ()) -> str:
    """Checks profiling options, and joins them by `:`.

    Raises:
      ValueError: no option is given, or an option is unknown.
    """
    options = list(profiling_options)
    if not options or not set(options) <= set(_PROFILING_OPTIONS):
        raise ValueError(
            f"profiling_options is empty or has an unknown option. Expected some of {', '.join(_PROFILING_OPTIONS)}; "
            f"got {options!r}. Name at least one of these options."
        )
    return ":".join(options)


def check_path(path: str) -> str:
    """Returns the real path of an existing directory that can be read and written.

    Raises:
      ValueError: the directory does not exist, or cannot be read and written.
    """
    return resolve_usable_directory(path)


def check_aoe_mode(aoe_mode: str) -> None:
    """Checks that a value is a tuning mode.

    Raises:
      ValueError: `aoe_mode` is not "1", "2" or "4".
    """
    try:
        check_not_none(aoe_mode, "aoe_mode")
        OPTIONS["aoe_mode"].check(aoe_mode, IN_OBJECT)
    except TypeError as error:
        raise ValueError(str(error)) from error


def check_root_rank(owner: str, root_rank: Any) -> None:
    """Raises ValueError if `root_rank` is not a rank of the job; does nothing with a single rank."""
    size = collective.current().size
    if size > 1 and root_rank not in range(size):
        raise ValueError(
            f"{owner}: root_rank is not a rank. Expected an integer from 0 to {size - 1}; got {root_rank!r}. Use 0."
        )


def check_model_dir(folder: str) -> None:
    """Creates a folder for checkpoints; raises OSError if it cannot be written. Accepts any remote folder."""
    if "://" in folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        expected, fix = "a folder that can be written", "Choose another folder."
        raise OSError(message("NPUEstimator", "model_dir cannot be used", expected, f"{folder} ({reason})", fix))


def warn_uncounted_steps() -> None:
    """Warns once on rank 0 that training steps are not counted, and hides TensorFlow's own later warnings."""
    hide_global_step_warning()
    if collective.current().rank == 0:
        problem = "no step is counted: training never reaches its last step, and every checkpoint is of step 0"
        fix = (
            "Write optimizer.minimize(loss, tf.train.get_global_step()), or pass it to apply_gradients. If the "
            "optimizer ignores it, as BERT's does, use tf.group(train_op, tf.train.get_global_step().assign_add(1))."
        )
        text = message("global_step", problem, "a train_op that increases global_step", "a train_op that does not", fix)
        say_once(logging.WARNING, text)


def check_steps_are_counted(graph: tf.Graph) -> None:
    """Warns if optimizers of this package train in a graph that never increases the global step."""
    global_step = global_step_of(graph)
    if pipelines_in(graph) and isinstance(global_step, tf.Variable) and not is_ever_changed(global_step):
        warn_uncounted_steps()


def _check_kind_of_value(kind: Integer | Boolean, value: Any, name: str) -> None:
    problem = kind.find_problem(value)
    if problem is not None:
        raise problem.error(f"{name} {problem.says}. Expected {kind.expected}; got {shown(value)}. {problem.fix}")


def accept_tpu_keywords(keywords: Iterable[str]) -> None:
    """Warns once that arguments of a TPUEstimator have no effect.

    Raises:
      TypeError: a keyword is not an argument of a TPUEstimator.
    """
    for name in keywords:
        if name not in _TPU_KEYWORDS:
            fix = did_you_mean(name, _TPU_KEYWORDS, "")
            raise TypeError(f"NPUEstimator() got an unexpected keyword argument {name!r}. {fix}".rstrip())
    if keywords:
        text = f"NPUEstimator: arguments of a TPUEstimator have no effect here: {', '.join(sorted(keywords))}. "
        say_once(logging.WARNING, text + "Leave them out; an input_fn makes the batches.")


def resolve_model_dir(model_dir: str | bytes | os.PathLike | None, config: Any) -> str:
    """Returns an Estimator's folder: `model_dir`, else the folder of `config`, else a new folder in the current folder.

    Raises:
      ValueError: `model_dir` and `config` give different folders, or a name that TensorFlow takes for a pattern.
    """
    model_dir = None if model_dir is None else os.fsdecode(model_dir)
    if model_dir is not None and config.model_dir is not None and model_dir != config.model_dir:
        raise ValueError(
            f"NPUEstimator: two model folders are given. Expected the same model_dir as in the NPURunConfig; got "
            f"{model_dir!r} and {config.model_dir!r}. Pass model_dir in one place."
        )
    if model_dir is not None or config.model_dir is not None:
        found = model_dir if model_dir is not None else config.model_dir
        check_folder_name("NPUEstimator", found)
        return found
    characters = random.SystemRandom().sample(string.ascii_letters + string.digits, 10)
    created = os.path.join(os.getcwd(), "model_dir_" + "".join(characters))
    os.makedirs(created)
    advice = " Ranks do not share it; set model_dir." if collective.current().size > 1 else ""
    _LOG.warning("NPUEstimator: no model_dir is set; checkpoints go to the new folder %s.%s", created, advice)
    return created


def check_output_of_tensors(tensors: Any, dependencies: Any, output_fn: Any) -> None:
    """Checks arguments of `NPUOutputTensorHook`.

    Raises:
      ValueError: there are tensors, but no function for their values.
      TypeError: there are dependencies, but `tensors` is not a dict of tensors.
    """
    if tensors is None:
        return
    if not callable(output_fn):
        raise ValueError(
            f"NPUOutputTensorHook: output_fn is missing. Expected a function that takes a list of dicts; got "
            f"{output_fn!r}. Pass output_fn, or tensors=None to collect nothing."
        )
    values = tensors.values() if isinstance(tensors, dict) else [None]
    is_dict = all(isinstance(value, (tf.Tensor, tf.Variable)) for value in values)
    if dependencies is not None and not is_dict:
        raise TypeError(
            f"NPUOutputTensorHook: dependencies needs tensors as a dict. Expected a dict of tensors; got {tensors!r}. "
            f"Pass {{tag: tensor}}, or leave dependencies out."
        )


class LoopStepsHook(tf.estimator.SessionRunHook):
    """Warns at the start of a training if its last loop trains more steps (updates) than asked for.

    Args:
      steps: the number of steps to train; None for no limit.
      loop: the number of batches of a loop.
    """

    def __init__(self, steps: int | None, loop: int):
        self._steps, self._loop = steps or 0, loop

    def begin(self):
        steps, loop = self._steps, self._loop
        batches = batches_per_update_in(tf.compat.v1.get_default_graph())
        trained = -(-steps * batches // loop) * loop // batches
        if trained > steps:
            _LOG.warning(
                "NPUEstimator: the last loop trains more steps than asked for. Expected a multiple of "
                "iterations_per_loop=%d; got %d further steps%s. Train %d, or set iterations_per_loop=1.",
                loop,
                steps,
                f" of {batches} batches" if batches > 1 else "",
                trained,
            )
