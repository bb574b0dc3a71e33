"""Scales losses in custom training loops: one backward pass or several, each with its loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge.base.arguments import check_count, check_instance
from npu_bridge.base.errors import did_you_mean, message, shown
from npu_bridge.base.terminal import logger
from npu_bridge.estimator.npu.npu_loss_scale_manager import MovingLossScaleManager
from npu_bridge.gradients.arithmetic import sum_gradients_by_variable
from npu_bridge.gradients.optimizer import check_loss_id
from npu_bridge.gradients.scale_rule import MOST_COUNTED_STEPS, check_scale
from npu_bridge.gradients.step import Step
from npu_bridge.gradients.steps.backward_passes import BackwardPasses

__all__ = ["ScaledLoss", "load_state_dict", "scale_loss", "state_dict", "unscaled_gradients"]

_LOG = logger(__name__)
_PREFIX = "loss_scaler"
_NAMES = {"loss_scale": "scale", "unskipped": "good_steps", "bad_steps": "bad_steps"}


class scale_loss:  # noqa: N801 - used like a function, as in `with scale_loss(...) as scaled`
    """Runs a backward pass with the loss scale of an optimizer, in a custom loop.

    Several passes can precede one update: their gradients are summed, each unscaled by its own loss scale.
    `unscaled_gradients` returns the sum, averaged over the ranks, for clipping and for `apply_gradients`. If the
    gradients of one pass overflow on any rank, every rank skips the update and only changes the loss scales. A scale
    shrinks only if its own losses overflowed. An error inside the context drops all passes since the last update.

    Args:
      loss: scalar tensor.
      optimizer: an optimizer of this package, such as `NPUOptimizer` or the result of `npu_keras_optimizer`.
      loss_id: position of the loss's manager among several loss-scale managers.
      delay_unscale: leaves the gradients scaled, and adds them to the gradients of the next pass with this `loss_id`.
        Not allowed in the last pass before an update.
    Raises:
      TypeError: `optimizer` is not from this package, or `loss_id` is not an integer.
      ValueError: no loss-scale manager has the position `loss_id`.
    Example:
      >>> with tf.GradientTape() as tape:
      ...     loss = loss_of(model, batch)
      >>> with scale_loss(loss, optimizer) as scaled:
      ...     scaled.backward(tape, model.trainable_variables)
      >>> optimizer.apply_gradients(unscaled_gradients(optimizer))
    """

    def __init__(self, loss: tf.Tensor, optimizer: Any, loss_id: int = 0, delay_unscale: bool = False):
        self._passes = _backward_passes_of(optimizer, "scale_loss")
        self._loss = loss
        self._loss_id = check_loss_id("scale_loss", loss_id, self._passes.pipeline.loss_scale_managers)
        self._delays_unscale = bool(delay_unscale)
        self._scaled: ScaledLoss | None = None

    def __enter__(self) -> ScaledLoss:
        self._scaled = ScaledLoss(self._loss, self._passes.open_step(), self._passes, self._loss_id)
        return self._scaled

    def __exit__(self, kind, error, trace) -> None:
        scaled = self._scaled
        if kind is not None:
            self._passes.discard_passes()
            return
        if not scaled.grads_and_vars:
            problem, expected = "the pass has no gradients", "a call of scaled.backward or scaled.add"
            fix = "Write scaled.backward(tape, variables)."
            raise ValueError(message("scale_loss", problem, expected, "no call", fix))
        self._passes.add(scaled.step, scaled.grads_and_vars, self._loss_id, self._delays_unscale)


class ScaledLoss:
    """The result of `scale_loss`: a loss multiplied by its scale, and its gradients.

    Attributes:
      tensor: the scaled loss, float32 at least, to be differentiated by `tf.gradients` or inside a tape.
      grads_and_vars: the pairs of (gradient, variable) that `backward` and `add` have collected.
      step: the step that the pass belongs to.
    """

    def __init__(self, loss: tf.Tensor, step: Step, passes: BackwardPasses, loss_id: int):
        loss = tf.convert_to_tensor(loss)
        self.step = step
        self.grads_and_vars: list = []
        self._loss = loss
        # The user's tape can have stopped, so another one records what stages do to the loss.
        with tf.GradientTape(persistent=True) as self._tape:
            self._tape.watch(loss)
            wide = loss if loss.dtype.size >= tf.float32.size else tf.cast(loss, tf.float32)
            self.tensor = passes.pipeline.scale(wide, step, loss_id)

    def backward(self, tape: tf.GradientTape, variables: Sequence[tf.Variable]) -> list:
        """Computes the gradients of the scaled loss, and adds them to the pass.

        Args:
          tape: the tape that recorded the loss; must be persistent if it recorded several losses.
          variables: the variables to differentiate by.
        Returns:
          The gradients, still multiplied by the scale, in the order of the variables; None if there is no gradient.
        """
        variables = list(variables)
        factor, *direct = self._tape.gradient(self.tensor, [self._loss, *variables])
        through_loss = tape.gradient(self._loss, variables, output_gradients=factor)
        # A stage can add terms of the variables themselves, such as a penalty of large weights.
        gradients = [
            sum_gradients_by_variable([(grad, variable)], [(term, variable)])[0][0]
            for grad, term, variable in zip(through_loss, direct, variables)
        ]
        self.add(zip(gradients, variables))
        return gradients

    def add(self, grads_and_vars: Iterable[tuple]) -> None:
        """Adds gradients of the scaled loss that you have computed yourself.

        Args:
          grads_and_vars: pairs of (gradient or None, variable).
        """
        self.grads_and_vars += list(grads_and_vars)


def unscaled_gradients(optimizer: Any) -> list:
    """Returns the sum of the gradients of all backward passes since the last update, unscaled.

    Args:
      optimizer: the optimizer of the passes. The passes must run in the same function as this call.
    Returns:
      Pairs of (gradient or None, variable), averaged over the ranks if the optimizer is distributed. Pass them to
      `apply_gradients`, clipped or otherwise changed if you like.
    Raises:
      TypeError: `optimizer` is not from this package.
      ValueError: there was no pass, or the last one had `delay_unscale=True`.
    Ranks: collective if the optimizer is distributed.
    """
    return _backward_passes_of(optimizer, "unscaled_gradients").finish()


def state_dict(optimizer: Any, session: Any = None) -> dict:
    """Returns the loss scales of an optimizer as plain numbers, for custom checkpoints.

    TensorFlow's own checkpoints contain the loss scales anyway.

    Args:
      optimizer: an optimizer of this package.
      session: the training session of a TF 1 graph; by default the default session.
    Returns:
      A dict with the keys "loss_scaler0", "loss_scaler1" and so on, one for each manager. Each value is a dict of
      `loss_scale`, `unskipped` (good steps in a row) and `bad_steps`: numbers, or lists for group loss scales.
    Raises:
      TypeError: `optimizer` or a manager is not from this package.
      ValueError: there is no session.
    """
    managers = _backward_passes_of(optimizer, "state_dict").pipeline.loss_scale_managers
    return {f"{_PREFIX}{number}": _state_of_manager(manager, session) for number, manager in enumerate(managers)}


def load_state_dict(optimizer: Any, state: Mapping[str, Mapping], session: Any = None) -> None:
    """Sets the loss scales of an optimizer to the result of `state_dict`; changes nothing if it raises an error.

    Args:
      optimizer: an optimizer of this package. If it has fewer managers than `state`, the remaining entries are
        ignored with a warning.
      state: a result of `state_dict`; `bad_steps` can be missing.
      session: as in `state_dict`.
    Raises:
      TypeError: `optimizer` is not from this package, or a value is not a number.
      ValueError: a key is unknown, a value is out of range, has another shape or differs from a fixed scale, or there
        is no session.
    Ranks: local; pass the same state on all ranks.
    """
    owner = "load_state_dict"
    managers = _backward_passes_of(optimizer, owner).pipeline.loss_scale_managers
    _check_mapping(owner, "state", state)
    numbers = {key: _manager_number(owner, key) for key in state}
    left_out = sorted(key for key, number in numbers.items() if number >= len(managers))
    if left_out:
        _LOG.warning(
            "%s: the optimizer has only %d loss-scale managers; ignored %s.", owner, len(managers), ", ".join(left_out)
        )
    loading = [(managers[number], key, state[key]) for key, number in numbers.items() if number < len(managers)]
    for manager, key, values in loading:
        _check_mapping(owner, key, values)
        _check_state(f"{owner}, {key}", manager, values)
    for manager, _, values in loading:
        if isinstance(manager, MovingLossScaleManager):
            manager.set_state((values["loss_scale"], values["unskipped"], values.get("bad_steps", 0)), session)


def _backward_passes_of(optimizer, owner) -> BackwardPasses:
    # Keras wrappers forward attributes of the optimizer inside. Only classes of this package have this attribute.
    passes = getattr(optimizer, "backward_passes", None)
    if not isinstance(passes, BackwardPasses):
        expected, fix = "an optimizer of npu_bridge", "Pass the result of NPUOptimizer or npu_keras_optimizer."
        raise TypeError(message(owner, "the optimizer cannot scale losses", expected, shown(optimizer), fix))
    return passes


def _state_of_manager(manager, session):
    if not isinstance(manager, MovingLossScaleManager):
        scale = manager.agreed_constants().get("loss_scale")
        if scale is None:
            problem, fix = "the numbers of a manager are not known", "Save its variables in a checkpoint of TensorFlow."
            raise TypeError(message("state_dict", problem, "a manager of npu_bridge", shown(manager), fix))
        return {"loss_scale": scale, "unskipped": 0, "bad_steps": 0}
    state = manager.get_state(session)._asdict()
    return {name: state[own].tolist() for name, own in _NAMES.items()}


def _manager_number(owner, key):
    number = key[len(_PREFIX) :] if isinstance(key, str) and key.startswith(_PREFIX) else ""
    if not number.isdecimal():
        fix = "Pass the result of state_dict."
        raise ValueError(message(owner, "unknown key", "loss_scaler0, loss_scaler1, ...", shown(key), fix))
    return int(number)


def _check_mapping(owner, name, value):
    expected, fix = "a dictionary, as state_dict returns it", "Pass the result of state_dict."
    check_instance(owner, name, value, Mapping, "a dictionary", fix, expected)


def _check_values(owner, manager, values):
    """Checks that step counts are integers within range, and that all values have the manager's shape."""
    shape = tuple(manager.scale_shape) if isinstance(manager, MovingLossScaleManager) else ()
    fix = "Pass the result of state_dict."
    expected = f"one number, or the shape {shape}" if shape else "one number"
    for key in ("loss_scale", "unskipped", "bad_steps"):
        value = values.get(key, 0)
        try:
            is_alike = np.shape(value) in ((), shape)
        except ValueError:  # lists of different lengths
            is_alike = False
        if not is_alike:
            raise ValueError(message(owner, f"{key} has another shape", expected, shown(value), fix))
    for key in ("unskipped", "bad_steps"):
        for steps in np.ravel(values.get(key, 0)).tolist():
            check_count(owner, key, steps, fix, at_least=0, at_most=MOST_COUNTED_STEPS, value_text="a number of steps")


def _check_state(owner, manager, values):
    for key in values:
        if key not in _NAMES:
            fix = did_you_mean(key, _NAMES, "Remove it.")
            raise ValueError(message(owner, "unknown key", f"one of {', '.join(_NAMES)}", shown(key), fix))
    for key in ("loss_scale", "unskipped"):
        if key not in values:
            raise ValueError(
                message(owner, f"{key} is missing", f"{key} of each manager", shown(values), f"Add {key}.")
            )
    _check_values(owner, manager, values)
    if isinstance(manager, MovingLossScaleManager):
        manager.check_state((values["loss_scale"], values["unskipped"], values.get("bad_steps", 0)), owner)
        return
    own = manager.agreed_constants().get("loss_scale")
    check_scale(owner, "loss_scale", values["loss_scale"])
    if own is not None and own != values["loss_scale"]:
        fix = "Make the manager with the new scale."
        problem, got = "a fixed loss scale cannot change", shown(values["loss_scale"])
        raise ValueError(message(owner, problem, f"loss_scale={own}", got, fix))
