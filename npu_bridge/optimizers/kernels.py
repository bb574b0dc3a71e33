"""Rules run by TensorFlow's own update kernels, which go over a variable and its slots once.

The formula of a rule, op by op, writes a tensor of the variable's size for each of its terms. On large variables that
is what an update costs.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.optimizers.per_variable import working_dtype
from npu_bridge.optimizers.rule import Rule
from npu_bridge.optimizers.rules.adam import Adam, AdamW
from npu_bridge.optimizers.rules.lamb import LAMB
from npu_bridge.optimizers.rules.sgd import SGD


def fits(variable: Any, slots: dict, rule: Rule) -> bool:
    """True when kernels can update this variable by this rule."""
    is_resource = all(hasattr(kept, "handle") for kept in (variable, *slots.values()))
    known = _KERNELS.get(type(rule))  # not of a subclass, which may have another formula
    return is_resource and working_dtype(variable) == variable.dtype.base_dtype and known is not None and known[0](rule)


def update(variable: Any, gradient: tf.Tensor, slots: dict, rule: Rule, at: Any) -> Any:
    """Updates a variable and its slots where `fits` is True.

    Args:
      variable: the variable.
      gradient: dense, of its shape and dtype.
      slots: slot variables by name.
      rule: what to do.
      at: the hyper-parameters of this update, see `values_at`.
    Returns:
      The op to wait for; None when executed eagerly.
    """
    decays = rule.decays(at)
    if decays and rule.decay == "coupled":
        gradient = gradient + at.weight_decay * variable.read_value()
    if not (decays and rule.decay == "decoupled"):
        return _KERNELS[type(rule)][1](variable, gradient, slots, rule, at)
    lost = at.learning_rate * at.weight_decay * variable.read_value()
    with tf.control_dependencies([lost]):
        done = _KERNELS[type(rule)][1](variable, gradient, slots, rule, at)
    with _after(done):
        return variable.assign_sub(lost, read_value=False)


def _sgd(variable, gradient, slots, rule, at):
    if not slots:
        return tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=at.learning_rate, delta=gradient)
    return tf.raw_ops.ResourceApplyMomentum(
        var=variable.handle,
        accum=slots["momentum"].handle,
        lr=at.learning_rate,
        grad=gradient,
        momentum=at.momentum,
        use_nesterov=rule.nesterov,
    )


def _adam(variable, gradient, slots, rule, at):
    epsilon = at.epsilon
    if rule.epsilon_placement == "corrected":
        epsilon = epsilon * tf.sqrt(1.0 - tf.pow(at.beta_2, at.update))
    return _apply_adam(variable.handle, gradient, slots, at, at.learning_rate, epsilon, is_corrected=True)


def _apply_adam(handle, gradient, slots, at, rate, epsilon, is_corrected):
    """Adam's kernel: epsilon stands beside the root of the uncorrected `v`."""
    zero = tf.zeros([], gradient.dtype)
    return tf.raw_ops.ResourceApplyAdam(
        var=handle,
        m=slots["m"].handle,
        v=slots["v"].handle,
        beta1_power=tf.pow(at.beta_1, at.update) if is_corrected else zero,
        beta2_power=tf.pow(at.beta_2, at.update) if is_corrected else zero,
        lr=rate,
        beta1=at.beta_1,
        beta2=at.beta_2,
        epsilon=epsilon,
        grad=gradient,
    )


def _lamb(variable, gradient, slots, rule, at):
    """Adam's kernel lowers a scratch variable that starts as `-weight_decay * p` by one direction: it becomes `-u`.

    The scratch variable exists during the update only.
    """
    parameter = variable.read_value()
    is_decayed = rule.decay == "in_direction" and rule.decays(at)
    start = -at.weight_decay * parameter if is_decayed else tf.zeros_like(parameter)
    name = f"{variable.name.split(':')[0]}/direction"
    scratch = tf.raw_ops.VarHandleOp(
        dtype=variable.dtype.base_dtype, shape=variable.shape, shared_name=f"{slots['m'].name}/direction", name=name
    )
    epsilon = at.epsilon
    if rule.bias_correction:
        epsilon = epsilon * tf.sqrt(1.0 - tf.pow(at.beta_2, at.update))
    with _after(tf.raw_ops.AssignVariableOp(resource=scratch, value=start)):
        one = tf.ones([], gradient.dtype)
        lowered = _apply_adam(scratch, gradient, slots, at, one, epsilon, rule.bias_correction)
    with _after(lowered):
        backwards = tf.raw_ops.ReadVariableOp(resource=scratch, dtype=variable.dtype.base_dtype)
    rate = at.learning_rate
    if at.adapts_layer:
        norms = [tf.sqrt(2.0 * tf.nn.l2_loss(values)) for values in (parameter, backwards)]
        rate = rate * rule.ratio(*norms, at)
    done = tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=-rate, delta=backwards)
    with _after(done):
        return tf.raw_ops.DestroyResourceOp(resource=scratch)


def _after(op):
    return tf.control_dependencies([] if op is None else [op])


# The rules that have kernels: for which of their options, and how.
_KERNELS = {
    SGD: (lambda rule: not rule.is_on("dampening"), _sgd),
    Adam: (lambda rule: not rule.amsgrad, _adam),
    AdamW: (lambda rule: not rule.amsgrad, _adam),
    LAMB: (lambda rule: True, _lamb),
}
