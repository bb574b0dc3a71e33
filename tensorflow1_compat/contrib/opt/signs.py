"""Rates that depend on whether gradient and momentum agree in sign (Bello and others: Neural Optimizer Search)."""

from __future__ import annotations

import math

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.opt.updating import UpdatingOptimizer


def _fraction(step, decay_steps):
    """How much of the decay is over, from 0 to 1."""
    return tf.minimum(tf.cast(step, tf.float32), decay_steps) / decay_steps


def _half_wave(turns, stage, zero_after):
    """Half a period of a cosine for each of `turns`, and 0 from `stage` = `zero_after` on."""
    wave = 0.5 * (1 + tf.cos(math.pi * turns))
    return wave if zero_after is None else tf.where(stage >= zero_after, tf.zeros_like(wave), wave)


def get_linear_decay_fn(decay_steps):
    """A function of the step: from 1 to 0 in `decay_steps`."""
    return lambda step: 1 - _fraction(step, decay_steps)


def get_cosine_decay_fn(decay_steps, num_periods=0.5, zero_after=None):
    """A function of the step: `num_periods` of a cosine between 1 and 0; 0 after `zero_after` periods."""

    def decay(step):
        periods = num_periods * _fraction(step, decay_steps)
        return _half_wave(2 * periods, periods, zero_after)

    return decay


def get_restart_decay_fn(decay_steps, num_periods=1, zero_after=None):
    """A function of the step: from 1 to 0 along a cosine, `num_periods` times; 0 after `zero_after` periods."""

    def decay(step):
        periods = num_periods * _fraction(step, decay_steps)
        return _half_wave(tf.floormod(periods, 1.0), periods, zero_after)

    return decay


class _SignOptimizer(UpdatingOptimizer):
    """`var -= learning_rate * factor * gradient`; the slot `m` is the mean of the gradients."""

    def __init__(self, learning_rate, beta, sign_decay_fn, use_locking, name):
        super().__init__(use_locking, name)
        self._lr, self._beta, self._sign_decay_fn, self._sign_decay = learning_rate, beta, sign_decay_fn, None

    def _factor(self, var, agreement):
        raise NotImplementedError

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """As any optimizer's; the decay of signs is that of `global_step`."""
        step = tf.train.get_global_step() if global_step is None else global_step
        if self._sign_decay_fn is not None:
            self._sign_decay = self._sign_decay_fn(step)
        return super().apply_gradients(grads_and_vars, global_step=global_step, name=name)

    def _create_slots(self, var_list):
        for var in var_list:
            self._zeros_slot(var, "m", self._name)

    def _step(self, var, grad):
        beta = self._number("beta", self._beta, var)
        mean = self.get_slot(var, "m")
        moved = tf.assign(mean, mean * beta + grad * (1 - beta), use_locking=self._use_locking)
        agreement = tf.sign(grad) * tf.sign(moved)
        if self._sign_decay is not None:
            agreement *= tf.cast(self._sign_decay, agreement.dtype)
        step = self._number("learning_rate", self._lr, var) * self._factor(var, agreement) * grad
        return tf.assign_sub(var, step, use_locking=self._use_locking).op


class AddSignOptimizer(_SignOptimizer):
    """The factor is `alpha + decay * sign(gradient) * sign(m)`."""

    def __init__(
        self, learning_rate=0.1, alpha=1.0, beta=0.9, sign_decay_fn=None, use_locking=False, name="AddSignOptimizer"
    ):
        super().__init__(learning_rate, beta, sign_decay_fn, use_locking, name)
        self._alpha = alpha

    def _factor(self, var, agreement):
        return self._number("alpha", self._alpha, var) + agreement


class PowerSignOptimizer(_SignOptimizer):
    """The factor is `base ** (decay * sign(gradient) * sign(m))`."""

    def __init__(
        self, learning_rate=0.1, base=math.e, beta=0.9, sign_decay_fn=None, use_locking=False,
        name="PowerSignOptimizer",
    ):  # fmt: skip
        super().__init__(learning_rate, beta, sign_decay_fn, use_locking, name)
        self._base = base

    def _factor(self, var, agreement):
        return tf.pow(self._number("base", self._base, var), agreement)
