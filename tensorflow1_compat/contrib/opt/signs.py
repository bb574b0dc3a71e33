"""PowerSign and AddSign (Bello and others: Neural Optimizer Search with Reinforcement Learning), and their decays."""

from __future__ import annotations

import math

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.opt.updating import UpdatingOptimizer


class _SignOptimizer(UpdatingOptimizer):
    """A step of the gradient times a factor that depends on whether it agrees with its moving average (slot `m`)."""

    def __init__(self, learning_rate, beta, sign_decay_fn, use_locking, name):
        super().__init__(use_locking, name)
        self._lr, self._beta, self._sign_decay_fn = learning_rate, beta, sign_decay_fn
        self._decay = None

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        if self._sign_decay_fn is not None:
            if global_step is None:
                raise ValueError(f"{self.get_name()}: sign_decay_fn needs a global_step; got None.")
            self._decay = self._sign_decay_fn(tf.convert_to_tensor(global_step))
        return super().apply_gradients(grads_and_vars, global_step=global_step, name=name)

    def _create_slots(self, var_list):
        for var in var_list:
            self._zeros_slot(var, "m", self._name)

    def _factor(self, var, agreement):
        raise NotImplementedError

    def _step(self, var, grad):
        beta, rate = self._number("beta", self._beta, var), self._number("learning_rate", self._lr, var)
        slot = self.get_slot(var, "m")
        moved = tf.assign(slot, slot * beta + (1 - beta) * grad, use_locking=self._use_locking)
        decay = 1.0 if self._decay is None else tf.cast(self._decay, var.dtype.base_dtype)
        factor = self._factor(var, decay * tf.sign(grad) * tf.sign(moved))
        return tf.assign_sub(var, rate * factor * grad, use_locking=self._use_locking).op


class PowerSignOptimizer(_SignOptimizer):
    """`base ^ (decay * sign(g) * sign(m))` times the gradient."""

    def __init__(
        self, learning_rate=0.1, base=math.e, beta=0.9, sign_decay_fn=None, use_locking=False, name="PowerSignOptimizer"
    ):
        super().__init__(learning_rate, beta, sign_decay_fn, use_locking, name)
        self._base = base

    def _factor(self, var, agreement):
        return tf.pow(self._number("base", self._base, var), agreement)


class AddSignOptimizer(_SignOptimizer):
    """`alpha + decay * sign(g) * sign(m)` times the gradient."""

    def __init__(
        self, learning_rate=0.1, alpha=1.0, beta=0.9, sign_decay_fn=None, use_locking=False, name="AddSignOptimizer"
    ):
        super().__init__(learning_rate, beta, sign_decay_fn, use_locking, name)
        self._alpha = alpha

    def _factor(self, var, agreement):
        return self._number("alpha", self._alpha, var) + agreement


def get_linear_decay_fn(decay_steps):
    """A decay from 1 to 0 in a straight line over `decay_steps` steps."""

    def linear_decay_fn(global_step):
        step = tf.minimum(tf.cast(global_step, tf.float32), float(decay_steps))
        return (decay_steps - step) / decay_steps

    return linear_decay_fn


def get_cosine_decay_fn(decay_steps, num_periods=0.5, zero_after=None):
    """A decay along a cosine of `num_periods` periods over `decay_steps` steps, 0 after `zero_after` periods."""
    if zero_after is not None and zero_after < 0:
        raise ValueError(f"get_cosine_decay_fn: zero_after has to be positive; got {zero_after}.")

    def cosine_decay_fn(global_step):
        part = tf.minimum(tf.cast(global_step, tf.float32), float(decay_steps)) / decay_steps * num_periods
        decayed = 0.5 * (1.0 + tf.cos(2.0 * math.pi * part))
        return decayed if zero_after is None else tf.where(part >= zero_after, tf.zeros_like(decayed), decayed)

    return cosine_decay_fn


def get_restart_decay_fn(decay_steps, num_periods=1, zero_after=None):
    """Half a cosine from 1 to 0, `num_periods` times over `decay_steps` steps; 0 after `zero_after` of a period."""
    if zero_after is not None and zero_after < 0:
        raise ValueError(f"get_restart_decay_fn: zero_after has to be positive; got {zero_after}.")

    def restart_decay_fn(global_step):
        step = tf.minimum(tf.cast(global_step, tf.float32), float(decay_steps))
        part = tf.math.floormod(num_periods * step / decay_steps, 1.0)
        decayed = 0.5 * (1.0 + tf.cos(math.pi * part))
        return decayed if zero_after is None else tf.where(2 * part >= zero_after, tf.zeros_like(decayed), decayed)

    return restart_decay_fn
