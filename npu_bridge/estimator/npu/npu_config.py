"""Defines the configuration objects: `NPURunConfig` and its helpers.

Parameters, defaults, order, types and checks come from the table in `npu_bridge.options`; this module defines
the objects and their interface to `tf.estimator`.
"""

from __future__ import annotations

import enum
import functools
import os
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.tf_internals.training import distribute_config, restrict_file_writing
from npu_bridge.collective.small_values import wait_for_ranks
from npu_bridge.gradients import collections
from npu_bridge.options import OPTIONS, construction, from_shell, make_session_config, read_run_config
from npu_bridge.options.construction import DeclaredConfig, declare_constructor
from npu_bridge.options.table import DUMP, DYNAMIC_INPUT, EXPERIMENTAL, GRAPH_MEMORY, MEMORY, PROFILING, RUN_CONFIG
from npu_bridge.session import precision
from npu_bridge.session.determinism import choose_seed
from npu_bridge.session.devices import variable_device

__all__ = [
    "DumpConfig",
    "DynamicInputConfig",
    "ExperimentalConfig",
    "GraphMemoryOptimizeConfig",
    "MemoryConfig",
    "NPURunConfig",
    "NpuExecutePlacement",
    "ProfilingConfig",
]


class NpuExecutePlacement(enum.Enum):
    """The unit on which the NPU stack runs an operator; only recorded here."""

    ALL = "all"
    CUBE = "cube"
    VECTOR = "vector"
    TAISHAN = "taishan"
    DVPP = "dvpp"
    HOST = "host"


@declare_constructor(PROFILING)
class ProfilingConfig(DeclaredConfig):
    """The profile of a run: whether to write it, and its options.

    Raises:
      TypeError, ValueError: a value is not allowed, or profiling is on and `profiling_options` is not a JSON object.
    """


@declare_constructor(DUMP)
class DumpConfig(DeclaredConfig):
    """Which tensors to dump in which steps, or whether to look for overflow.

    Raises:
      TypeError, ValueError: a value is not allowed, both switches are on, or a switch is on without `dump_path`.
    """


@declare_constructor(MEMORY)
class MemoryConfig(DeclaredConfig):
    """Memory policies of the device.

    Raises:
      TypeError, ValueError: a value is not allowed.
    """


@declare_constructor(DYNAMIC_INPUT)
class DynamicInputConfig(DeclaredConfig):
    """Profiles of inputs with dynamic dimensions; has an effect only if all four values are set.

    Raises:
      TypeError, ValueError: a value is missing or not allowed.
    """


@declare_constructor(GRAPH_MEMORY)
class GraphMemoryOptimizeConfig(DeclaredConfig):
    """Recomputation and slicing of the graph.

    Raises:
      ValueError: a value is neither None, "auto" nor "manual".
    """


@declare_constructor(EXPERIMENTAL)
class ExperimentalConfig(DeclaredConfig):
    """Experimental switches, among them `accelerate_train_mode`.

    Raises:
      TypeError, ValueError: a value is not allowed.
    """


@declare_constructor(RUN_CONFIG)
class NPURunConfig(tf.estimator.RunConfig):
    """The configuration of a training, for `NPUEstimator` and for a plain `tf.estimator.Estimator`.

    Adds the options below to `tf.estimator.RunConfig`. The constructor raises an error for a value or combination
    that is not allowed. An option without effect on stock TensorFlow is kept and logged once at INFO.
    `docs/options.md` lists what each option does. `npu-run --set NAME=VALUE` overrides the values in a script.

    A plain Estimator gets the options through its session: `session_config` has them as an `NpuOptimizer` entry,
    which sessions read if `npu_bridge.npu_init` has been imported. An `NPUEstimator` needs no such import, and also
    applies the options while it builds the model function, which `hcom_parallel=False` requires.

    All other keywords of `tf.estimator.RunConfig`, such as `device_fn`, are accepted, too.

    Raises:
      TypeError, ValueError: a value or combination is not allowed, or TF_CONFIG does not fit the options.
    Ranks: only rank 0 writes checkpoints and summaries. The attributes have the same values on every rank.
    """

    @classmethod
    def from_file(cls, path: str | os.PathLike, **overrides: Any) -> NPURunConfig:
        """Makes a configuration from a TOML file.

        Top-level keys are parameters. A table such as `[dump_config]` holds the arguments of the object that is passed
        as the parameter of the same name:

            save_checkpoints_steps = 500
            precision_mode_v2 = "mixed_bfloat16"

            [dump_config]
            dump_path = "dump"
            enable_dump = true

        Each table `[[stages]]` describes a stage of `npu_bridge.stages`: the key `stage` is its class, the other keys
        are its arguments. The property `stages` returns the stages.

        Args:
          path: the file.
          **overrides: parameters that override the file, or that a file cannot hold (`session_config`,
            strategies).
        Raises:
          TypeError, ValueError: as for the constructor; the message starts with file, line and key.
          OSError: the file cannot be read.
        """
        from npu_bridge.options.config_file import build_from_file
        from npu_bridge.stages import from_config

        lists = {"stages": lambda table: from_config({"stages": [table]})[0]}
        return build_from_file(cls, path, overrides, _HELPERS, lists)

    @property
    def stages(self) -> tuple:
        """The stages in the `[[stages]]` tables of a TOML file; for `NPUOptimizer(..., stages=config.stages)`."""
        return self.__dict__.get("_stages", ())

    def _set_up(self, values: dict[str, Any], **base_arguments: Any) -> None:
        with from_shell.apply_settings(values, _HELPERS) as changed:
            self._initialise(changed, base_arguments)

    def _initialise(self, values: dict[str, Any], other_keywords: dict[str, Any]) -> None:
        construction.check_run_config(values)
        strategy = values["distribute"]
        of_base = {name: values[name] for name in construction.BASE_PARAMETERS}
        of_base["save_checkpoints_steps"] = construction.checkpoint_steps(values)
        of_base = {n: value if value is None else OPTIONS[n].kind.normalise(value) for n, value in of_base.items()}
        if strategy is not None:
            of_base["experimental_distribute"] = distribute_config(strategy)
        super().__init__(**of_base, **other_keywords)
        restrict_file_writing(NPURunConfig, lambda: collective.current().rank == 0, _wait_for_last_checkpoint)
        for option in OPTIONS.options_of(RUN_CONFIG):
            if option.name not in (*construction.BASE_PARAMETERS, "distribute"):
                setattr(self, option.attribute, values[option.name])
        construction.warn_about_checkpoint_times(
            self._save_checkpoints_steps, self._save_checkpoints_secs, values["iterations_per_loop"]
        )
        self._is_set_up = True
        precision.check_files(read_run_config(self))

    def __repr__(self) -> str:
        return construction.format_call(self, **construction.adjusted_defaults(self))

    @property
    def session_config(self) -> Any:
        """A copy of the given ConfigProto with an `NpuOptimizer` entry; None if no ConfigProto was given.

        If the property is None, an Estimator sets its default ConfigProto and reads the property again.
        """
        if self._session_config is None or not self.__dict__.get("_is_set_up"):
            return self._session_config
        return make_session_config(self)

    @property
    def tf_random_seed(self) -> int | None:
        """The seed of every graph; a fixed number if `deterministic=1` needs a seed and none was given."""
        if not self.__dict__.get("_is_set_up"):
            return self._tf_random_seed
        return choose_seed(read_run_config(self))

    @property
    def device_fn(self):
        """The given device function; with `variable_placement="Host"`, a function that puts variables on the CPU."""
        is_ready = self.__dict__.get("_is_set_up")
        if is_ready and read_run_config(self).variable_placement == "Host" and not self.cluster_spec:
            return functools.partial(variable_device, device_of_others=self._device_fn)
        return self._device_fn


_HELPERS = {
    cls._declared_as: cls
    for cls in (
        ProfilingConfig,
        DumpConfig,
        MemoryConfig,
        DynamicInputConfig,
        GraphMemoryOptimizeConfig,
        ExperimentalConfig,
    )
}


def _wait_for_last_checkpoint() -> None:
    """Waits, if the ranks train together, for rank 0's last checkpoint, because other ranks can read it next."""
    if any(pipeline.communicates for pipeline in collections.pipelines_in(tf.compat.v1.get_default_graph())):
        wait_for_ranks("training_is_saved")
