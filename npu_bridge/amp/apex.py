"""Implements `initialize`, which calls `configure` with the arguments of APEX."""

from __future__ import annotations

import logging
from typing import Any

from npu_bridge.amp.configuration import configure
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message, say_once, shown

_OWNER = "amp.initialize"
_OTHER_NAMES = {"patch_torch_functions": "patch_functions"}


def initialize(
    models: Any = None,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    verbosity: int = 1,
    combine_grad: bool | None = None,
    combine_ddp: bool | None = None,
    ddp_replica_count: int = 4,
    check_combined_tensors: bool | None = None,
    **overrides: Any,
) -> Any:
    """Calls `configure` as APEX does: `model, optimizer = initialize(model, optimizer, opt_level="O2")`.

    Args:
      models: a Keras model, or None.
      optimizers: an optimizer, or None.
      enabled: False returns model and optimizer unchanged.
      opt_level: "O0" to "O3".
      verbosity: 0 logs nothing.
      combine_grad: as in `NPUOptimizer`; only for O1, and for O2 with master weights.
      combine_ddp: whether to average gradients over the ranks; needs `combine_grad`.
      ddp_replica_count: has no effect; `gradient_split_groups` splits gradients into all-reduces.
      check_combined_tensors: as in `NPUOptimizer`; used with `combine_grad`.
      **overrides: as for `configure`; `patch_torch_functions` is another name of `patch_functions`.
    Returns:
      (model, optimizer); only the model, or only the optimizer, if the other argument is None.
    Raises:
      TypeError, ValueError: as for `configure`; also for a list of models or optimizers, and for arguments that
        contradict each other.
    """
    for name, value in (("models", models), ("optimizers", optimizers)):
        if isinstance(value, (list, tuple)):
            fix = "Call amp.configure for each element."
            raise TypeError(message(_OWNER, f"{name} is a list", f"a single {name[:-1]}", shown(value), fix))
    check_count(_OWNER, "ddp_replica_count", ddp_replica_count)
    if enabled:
        overrides = {_OTHER_NAMES.get(name, name): value for name, value in overrides.items()}
        _check_combined(opt_level, combine_grad, combine_ddp, overrides.get("master_weights"))
        if combine_ddp is not None:
            overrides.setdefault("is_distributed", combine_ddp)
        of_combining = {"combine_grad": combine_grad, "check_combined_tensors": check_combined_tensors}
        overrides.update({name: value for name, value in of_combining.items() if value is not None})
        made = configure(opt_level, optimizers, models, **overrides)
        if verbosity:
            told = ", ".join(f"{name} {value}" for name, value in made.properties._asdict().items())
            say_once(logging.INFO, f"{_OWNER}: {opt_level}: {told}.")
        models, optimizers = made.model, made.optimizer
    if optimizers is None or models is None:
        return models if optimizers is None else optimizers
    return models, optimizers


def _check_combined(level: str, combine_grad: bool | None, combine_ddp: bool | None, master_weights: Any) -> None:
    if combine_ddp and not combine_grad:
        problem, expected, fix = "combine_ddp needs combine_grad", "combine_grad=True", "Pass combine_grad=True."
        raise ValueError(message(_OWNER, problem, expected, shown(combine_grad), fix))
    if not combine_grad:
        return
    if level not in ("O1", "O2"):
        problem = "combine_grad needs a level that scales gradients"
        raise ValueError(message(_OWNER, problem, "O1 or O2", level, "Leave combine_grad out."))
    if level == "O2" and master_weights in (False, "False"):
        problem = "combine_grad needs the master weights of O2"
        raise ValueError(
            message(_OWNER, problem, "master_weights=True", shown(master_weights), "Leave combine_grad out.")
        )
