"""Sets up a trial in a process before the script begins; each part takes effect once TensorFlow is loaded."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import types
from typing import Any, Callable

from npu_bridge.base.after_import import call_when_loaded, wrap_function
from npu_bridge.base.environment import options_set_by_launcher
from npu_bridge.base.session_wrapper import SessionEngine, add_engine
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.names import ESTIMATOR_MODULE, KERAS, KERAS_MODEL_MODULES
from npu_bridge.base.tf_internals.training import watch_keras_optimizers
from npu_run.trials.trial import Trial

_KERASES = {"keras", KERAS}
_MODELS_IN_FIT: list[Any] = []  # models that are being fitted


def begin_trial(trial: Trial, rank: int) -> Callable[[], None]:
    """Sets up this process to run a script as a trial; returns a function to call when the script ends."""
    if trial.seed is not None:
        from npu_run.trials.seeds import pin_seeds

        pin_seeds(trial.seed, rank)
    call_when_loaded("tensorflow", functools.partial(_prepare_tensorflow, trial, rank))
    if options_set_by_launcher():
        for name in _KERASES:
            call_when_loaded(name, lambda module: _let_sessions_read_options())
    end = watch_training(functools.partial(_choose_hooks, trial, rank))
    if trial.folder:
        # The output of a script that is ended early is not a result, and goes to a separate folder.
        is_short = trial.steps or trial.replay
        folder = os.path.join(trial.folder, "model") if is_short else trial.folder
        call_when_loaded(ESTIMATOR_MODULE, functools.partial(_redirect_estimators, folder))
    for name in KERAS_MODEL_MODULES:
        call_when_loaded(name, functools.partial(_add_callback, trial, rank))
    if trial.record or trial.replay or trial.operators:
        for watch in (watch_keras_optimizers, keras3.watch_optimizers):
            watch(lambda optimizer: None, _end_script_at_eager_update)
    return end


def watch_training(make_hooks: Callable[[], list]) -> Callable[[], None]:
    """Calls hooks around every session run of this process that trains, also in sessions that the script makes itself.

    Args:
      make_hooks: returns a list of `TrainingHook`; called when a session first runs, because hooks need TensorFlow.
    Returns:
      A function to call when the script ends.
    """

    watch = _TrialHookEngine(make_hooks)
    add_engine(None, watch)
    return watch.end


class _TrialHookEngine(SessionEngine):
    """A session engine that delegates to a `TrainingHookEngine`, made when a session first runs."""

    def __init__(self, make_hooks: Callable[[], list]):
        self._make_hooks = make_hooks

    def run(self, session, *arguments):
        return self._watch.run(session, *arguments)

    def prepare_call(self, session, callable_options):
        return self._watch.prepare_call(session, callable_options)

    def close(self, session):
        vars(self).get("_watch", self.inner).close(session)

    def end(self) -> None:
        if "_watch" in vars(self):
            self._watch.end()

    @functools.cached_property
    def _watch(self) -> Any:
        from npu_bridge.session.hooked_session import TrainingHookEngine

        made = TrainingHookEngine(self._make_hooks())
        made.inner = self.inner
        return made


def _prepare_tensorflow(trial: Trial, rank: int, module: types.ModuleType) -> None:
    if options_set_by_launcher() and not _KERASES & set(
        sys.modules
    ):  # Keras is only half loaded here if a script imports it first
        _let_sessions_read_options()
    from npu_bridge.base.tf_internals.training import call_after_gradients
    from npu_bridge.graph.run import record_gradients

    call_after_gradients(record_gradients)
    if trial.seed is not None:
        from npu_run.trials.seeds import pin_seeds_of_tensorflow

        pin_seeds_of_tensorflow(trial.seed, rank)
    if trial.record or trial.replay:
        module.config.experimental.enable_op_determinism()


def _let_sessions_read_options() -> None:
    importlib.import_module("npu_bridge.estimator")


def _choose_hooks(trial: Trial, rank: int) -> list:
    from npu_run.trials import hooks

    chosen: list = []
    if trial.rounding:
        chosen.append(hooks.RoundInitialWeightsHook(trial.rounding))
    if trial.operators and rank == 0:
        chosen.append(hooks.OperatorListHook(trial.operators))
    if trial.parameters and rank == 0:
        chosen.append(hooks.ParameterCountHook(trial.parameters))
    if trial.record:
        from npu_run.trials.record import RecordStepsHook

        chosen.append(RecordStepsHook(trial.record, trial.steps, rank, trial.tensors))
    if trial.folder:
        chosen.append(hooks.TrialHistoryHook(trial.folder))
    if trial.replay:
        from npu_run.trials.replay import ReplayStepsHook

        chosen.append(ReplayStepsHook(trial.replay, rank, os.path.join(trial.folder, f"replay_rank_{rank}.json")))
    if trial.steps:
        chosen.append(hooks.EndAfterStepsHook(trial.steps))
    return chosen


def _redirect_estimators(folder: str, module: types.ModuleType) -> None:
    """Makes Estimators write to a folder.

    Estimators with the first `model_dir` write to the folder itself. Each further `model_dir` becomes a sub-folder `2`,
    `3`, ...
    """
    from npu_bridge.base.tf_internals.training import redirect_estimator_folders

    places: dict[str, str] = {}

    def choose_folder(model_dir: str) -> str:
        if model_dir in places.values():
            return model_dir
        return places.setdefault(model_dir, os.path.join(folder, str(len(places) + 1)) if places else folder)

    redirect_estimator_folders(module, choose_folder)


def _end_script_at_eager_update(optimizer: Any, grads_and_vars: list) -> None:
    """Ends the script when its own eager loop first updates variables: eager steps cannot be recorded or listed."""
    import tensorflow as tf

    if not _MODELS_IN_FIT and tf.compat.v1.executing_eagerly_outside_functions():
        raise SystemExit(0)


def _add_callback(trial: Trial, rank: int, module: types.ModuleType) -> None:
    signature = inspect.signature(module.Model.fit)

    def fit_with_trial(fit, *arguments, **keywords):
        if options_set_by_launcher():
            _apply_precision_to_functions()
        bound = signature.bind(*arguments, **keywords)
        model, callbacks = bound.arguments["self"], bound.arguments.get("callbacks")
        # A fit inside of another one is not a part of the training.
        own = [] if _MODELS_IN_FIT else [*steps_of_fit(model), _callback_of_process(trial)]
        if isinstance(callbacks, (list, tuple)) or not hasattr(callbacks, "append"):
            given = callbacks if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
            bound.arguments["callbacks"] = [*given, *own]
        else:  # a CallbackList, whose constructor looks up what its callbacks need
            parameters = getattr(callbacks, "params", None) or {}
            bound.arguments["callbacks"] = type(callbacks)([*callbacks.callbacks, *own], model=model, **parameters)
        _MODELS_IN_FIT.append(model)
        try:
            return fit(*bound.args, **bound.kwargs)
        finally:
            _MODELS_IN_FIT.pop()

    first: list[Any] = []  # the first model, which alone counts, and its callback

    def steps_of_fit(model) -> list:
        import tensorflow as tf

        is_listing = trial.operators and rank == 0
        if not first and (trial.record or trial.replay or is_listing) and tf.executing_eagerly():
            from npu_run.trials.fit import OperatorTypesCallback, RecordCallback, ReplayCallback

            watch = RecordCallback if trial.record else ReplayCallback if trial.replay else OperatorTypesCallback
            first.extend([model, watch(model, trial, rank)])
        return first[1:] if first and first[0] is model else []

    wrap_function(module.Model, "fit", fit_with_trial)


@functools.cache
def _callback_of_process(trial: Trial) -> Any:
    """Returns the callback of all calls of `fit` in this process: together they are one training."""
    from npu_run.trials.hooks import TrialCallback

    return TrialCallback(trial)


@functools.cache
def _apply_precision_to_functions() -> None:
    from npu_bridge.options import read_session_config
    from npu_bridge.session.precision import Precision, lower_functions

    lower_functions(Precision(read_session_config(None)))
