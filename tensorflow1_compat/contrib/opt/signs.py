"""Defines decay functions for sign-based optimizers (Bello and others: Neural Optimizer Search)."""

from __future__ import annotations

import math

import tensorflow.compat.v1 as tf


def _elapsed_fraction(step, decay_steps):
    """Returns the elapsed share of the decay, from 0 to 1."""
    return tf.minimum(tf.cast(step, tf.float32), decay_steps) / decay_steps


def _compute_cosine_decay(full_turns, elapsed_fraction, zero_after):
    """Returns 0.5 * (1 + cos(pi * turns)), but 0 from the time at which `elapsed_fraction` reaches `zero_after`."""
    wave = 0.5 * (1 + tf.cos(math.pi * full_turns))
    return wave if zero_after is None else tf.where(elapsed_fraction >= zero_after, tf.zeros_like(wave), wave)


def get_linear_decay_fn(decay_steps):
    """Returns a function of the step that falls linearly from 1 to 0 in `decay_steps` steps."""
    return lambda step: 1 - _elapsed_fraction(step, decay_steps)


def get_cosine_decay_fn(decay_steps, num_periods=0.5, zero_after=None):
    """Returns a function of the step: `num_periods` cosine periods between 1 and 0; 0 after `zero_after` periods."""

    def decay(step):
        periods = num_periods * _elapsed_fraction(step, decay_steps)
        return _compute_cosine_decay(2 * periods, periods, zero_after)

    return decay


def get_restart_decay_fn(decay_steps, num_periods=1, zero_after=None):
    """Returns a function of the step: `num_periods` cosine decays from 1 to 0; 0 after `zero_after` periods."""

    def decay(step):
        periods = num_periods * _elapsed_fraction(step, decay_steps)
        return _compute_cosine_decay(tf.floormod(periods, 1.0), periods, zero_after)

    return decay
