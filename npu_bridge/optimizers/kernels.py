"""Runs rules with TensorFlow's own update kernels, which read and write a variable and its slots only once.

A rule's formula, run op by op, writes a tensor of the variable's size for each term. For large variables, these writes
take most of the time of an update.
"""

from __future__ import annotations

from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import is_compiled_by_xla, unique_id
from npu_bridge.optimizers.rule import Rule, TensorReductions
from npu_bridge.optimizers.rules.adam import Adam, AdamW
from npu_bridge.optimizers.rules.lamb import LAMB
from npu_bridge.optimizers.rules.sgd import SGD


def has_kernel(rule: Rule) -> bool:
    """Returns whether there is a kernel for a rule; False in a function that XLA compiles.

    XLA reads and writes a variable once for any formula, and has no variables that exist only within a step.
    """
    if not tf.executing_eagerly() and is_compiled_by_xla(tf.compat.v1.get_default_graph()):
        return False
    known = _KERNELS.get(type(rule))  # a subclass has no kernel, as it can have another formula
    return known is not None and known[0](rule)


def add_kernel_scalars(rule: Rule, hypers: Any) -> None:
    """Adds to `hypers` the scalars that a rule's kernel needs besides hyper-parameters; once for all variables."""
    if has_kernel(rule):
        hypers.of_kernel = _KERNELS[type(rule)][2](rule, hypers)


def update_variable(variable: Any, gradient: tf.Tensor, slots: dict, rule: Rule, hypers: Any) -> Any:
    """Updates a resource variable and its slots by the rule's kernel.

    Args:
      variable: a variable of the dtype in which the update is computed.
      gradient: dense, of the variable's shape and dtype.
      slots: slot variables by name.
      rule: a rule that has a kernel.
      hypers: the hyper-parameters from `compute_hyper_values`, after `add_kernel_scalars`.
    Returns:
      The op to wait for; None in eager execution.
    """
    handles = {name: slot.handle for name, slot in slots.items()}
    decays = rule.has_weight_decay(hypers)
    if decays and rule.decay == "coupled":
        gradient = gradient + hypers.weight_decay * variable.read_value()
    if isinstance(rule, LAMB):
        return _update_with_lamb(variable, gradient, handles, rule, hypers, f"{unique_id(slots['m'])}/direction")
    if not (decays and rule.decay == "decoupled"):
        return _apply_kernel(variable.handle, gradient, handles, rule, hypers)
    lost = hypers.learning_rate * hypers.weight_decay * variable.read_value()
    with tf.control_dependencies([lost]):
        done = _apply_kernel(variable.handle, gradient, handles, rule, hypers)
    with _control_dependency(done):
        return variable.assign_sub(lost, read_value=False)


def update_slots(
    parameter: tf.Tensor | None,
    gradient: tf.Tensor,
    slots: dict,
    rule: Rule,
    hypers: Any,
    tensors: TensorReductions,
    name: str,
) -> tf.Tensor:
    """Updates the slots; returns the tensor to add to the parameter: minus the amount of `Rule.amount_with_decay`.

    Args:
      parameter: a vector or a matrix; None if the rule does not read it.
      gradient: of the parameter's shape.
      slots: resource handles of vectors with as many elements as the parameter, by slot name.
      rule, hypers: as in `update_variable`.
      tensors: computes sums over whole tensors.
      name: name of a temporary variable.
    """
    decays = rule.has_weight_decay(hypers)
    if decays and rule.decay == "coupled":
        gradient = gradient + hypers.weight_decay * parameter
    start = tf.zeros_like(gradient)
    if decays and rule.decay == "in_direction":
        start = -hypers.weight_decay * parameter
    elif decays and rule.decay == "decoupled" and not isinstance(rule, LAMB):
        start = -hypers.learning_rate * hypers.weight_decay * parameter
    shape = gradient.shape
    if shape.rank != 1:  # the shape of the slots
        start, gradient = tf.reshape(start, [-1]), tf.reshape(gradient, [-1])
    scratch, lowered = _apply_to_temporary_variable(start, gradient, slots, rule, hypers, name)
    with tf.control_dependencies([lowered]):
        destroyed = tf.raw_ops.DestroyResourceOp(resource=scratch)
    with _control_dependency(destroyed):
        lowered = tf.identity(lowered) if shape.rank == 1 else tf.reshape(lowered, shape)
    if not isinstance(rule, LAMB):
        return lowered
    rate = hypers.learning_rate
    if hypers.adapts_layer:
        rate = rate * rule.trust_ratio(tensors.norm(parameter), tensors.norm(lowered), hypers)
    lowered = rate * lowered
    if decays and rule.decay == "decoupled":
        lowered = lowered - hypers.learning_rate * hypers.weight_decay * parameter
    return lowered


def _apply_to_temporary_variable(start, gradient, slots, rule, hypers, name):
    """Applies the kernel to a temporary variable that starts as `start`; returns its handle and its new value."""
    scratch = tf.raw_ops.VarHandleOp(dtype=start.dtype, shape=start.shape, shared_name=name)
    with _control_dependency(tf.raw_ops.AssignVariableOp(resource=scratch, value=start)):
        lowered = _apply_kernel(scratch, gradient, slots, rule, hypers)
    with _control_dependency(lowered):
        return scratch, tf.raw_ops.ReadVariableOp(resource=scratch, dtype=start.dtype)


def _apply_kernel(handle, gradient, slots, rule, hypers):
    """Applies the rule's kernel to a variable, without weight decay. For LAMB, the learning rate is 1."""
    return _KERNELS[type(rule)][1](handle, gradient, slots, rule, hypers)


def _apply_sgd(handle, gradient, slots, rule, hypers):
    if not slots:
        return tf.raw_ops.ResourceApplyGradientDescent(var=handle, alpha=hypers.learning_rate, delta=gradient)
    return tf.raw_ops.ResourceApplyMomentum(
        var=handle,
        accum=slots["momentum"],
        lr=hypers.learning_rate,
        grad=gradient,
        momentum=hypers.momentum,
        use_nesterov=rule.nesterov,
    )


def _apply_adam(handle, gradient, slots, rule, hypers):
    """Runs Adam's kernel, which adds epsilon to the root of the uncorrected `v`."""
    return tf.raw_ops.ResourceApplyAdam(
        var=handle,
        m=slots["m"],
        v=slots["v"],
        beta1=hypers.beta_1,
        beta2=hypers.beta_2,
        grad=gradient,
        **hypers.of_kernel,
    )


def _adam_scalars(rule, hypers):
    return _kernel_scalars(hypers, hypers.learning_rate, rule.epsilon_placement == "corrected", True)


def _lamb_scalars(rule, hypers):
    return _kernel_scalars(hypers, tf.ones_like(hypers.learning_rate), rule.bias_correction, rule.bias_correction)


def _kernel_scalars(hypers, rate, is_epsilon_corrected, is_corrected):
    powers = [
        tf.pow(beta, hypers.update) if is_corrected else tf.zeros_like(beta) for beta in (hypers.beta_1, hypers.beta_2)
    ]
    epsilon = hypers.epsilon * tf.sqrt(1.0 - powers[1]) if is_epsilon_corrected else hypers.epsilon
    return {"beta1_power": powers[0], "beta2_power": powers[1], "lr": rate, "epsilon": epsilon}


def _update_with_lamb(variable, gradient, slots, rule, hypers, name):
    """Computes the negative direction in a temporary variable by Adam's kernel, then updates the variable along it."""
    # Sequential, so that a thread finishes this variable before it begins the next: the output of one op is still in
    # the cache when the next one reads it. Reads that wait for nothing would run for all variables first.
    with tf.control_dependencies([gradient]):
        parameter = variable.read_value()
    decays = rule.has_weight_decay(hypers)
    start = -hypers.weight_decay * parameter if decays and rule.decay == "in_direction" else tf.zeros_like(parameter)
    rate, norms = hypers.learning_rate, []
    if hypers.adapts_layer:
        with tf.control_dependencies([start]):
            norms.append(_norm(parameter))
    with tf.control_dependencies(norms):
        scratch, minus_direction = _apply_to_temporary_variable(start, gradient, slots, rule, hypers, name)
    if hypers.adapts_layer:
        rate = rate * rule.trust_ratio(*norms, _norm(minus_direction), hypers)
    lost = None
    if decays and rule.decay == "decoupled":
        lost = hypers.learning_rate * hypers.weight_decay * parameter
    with tf.control_dependencies([] if lost is None else [lost]):
        done = tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=-rate, delta=minus_direction)
    with _control_dependency(done):
        destroyed = tf.raw_ops.DestroyResourceOp(resource=scratch)
    if lost is None:
        return destroyed
    with _control_dependency(destroyed):
        return variable.assign_sub(lost, read_value=False)


def _norm(values):
    return tf.sqrt(2.0 * tf.nn.l2_loss(values))


def _control_dependency(op):
    return tf.control_dependencies([] if op is None else [op])


# The rules that have kernels, with a check of their options, the kernel, and the scalars that all variables share.
_KERNELS = {
    SGD: (lambda rule: not rule.is_hyper_on("dampening"), _apply_sgd, lambda rule, hypers: {}),
    Adam: (lambda rule: not rule.amsgrad, _apply_adam, _adam_scalars),
    AdamW: (lambda rule: not rule.amsgrad, _apply_adam, _adam_scalars),
    LAMB: (lambda rule: True, _apply_adam, _lamb_scalars),
}
