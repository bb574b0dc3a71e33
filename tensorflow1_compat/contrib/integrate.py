"""`tf.contrib.integrate`: ordinary differential equations."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

_NODES = (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_WEIGHTS = (
    (), (1 / 5,), (3 / 40, 9 / 40), (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)  # fmt: skip  # Dormand and Prince, 5th order
_ERRORS = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


def odeint(func, y0, t, rtol=1e-6, atol=1e-12, method=None, options=None, full_output=False, name=None):
    """Solves dy/dt = func(y, t) with steps of the 5th order (Dormand and Prince) as short as the tolerance needs.

    Args:
      func: (y, t) -> dy/dt of y's shape and type.
      y0: the value at t[0].
      t: growing or falling times [n].
      rtol, atol: how far a step may be off.
      method: "dopri5" or None.
      options: `first_step` (0.1), `safety` (0.9), `ifactor` (10.0), `dfactor` (0.2), `max_num_steps` (1000).

    Returns:
      Values at all times: [n, *y0's shape].
    """
    if method not in (None, "dopri5") or full_output:
        raise ValueError("odeint: only method='dopri5' without full_output is available here.")
    options = dict(options or {})
    first, safety = options.pop("first_step", 0.1), options.pop("safety", 0.9)
    grows, shrinks = options.pop("ifactor", 10.0), options.pop("dfactor", 0.2)
    limit = options.pop("max_num_steps", 1000)
    with tf.name_scope(name, "odeint", [y0, t, rtol, atol]):
        y0 = tf.convert_to_tensor(y0)
        t = tf.convert_to_tensor(t, preferred_dtype=tf.float64)
        direction = tf.sign(t[-1] - t[0])

        def attempt(y, now, step):
            slopes = []
            for node, weights in zip(_NODES, _WEIGHTS):
                place = y
                for weight, slope in zip(weights, slopes):
                    place += tf.cast(step * weight, y.dtype) * slope
                slopes.append(func(place, now + node * step))
            wrong = tf.add_n([tf.cast(step * part, y.dtype) * slope for part, slope in zip(_ERRORS, slopes)])
            allowed = atol + rtol * tf.maximum(tf.abs(y), tf.abs(place))
            ratio = tf.sqrt(tf.reduce_mean(tf.square(tf.abs(wrong / tf.cast(allowed, y.dtype)))))
            return place, tf.cast(ratio, t.dtype)

        def to(carry, target):
            def step_on(y, now, step, count):
                left = (target - now) * direction
                tried = tf.minimum(step, left)
                new, ratio = attempt(y, now, tried * direction)
                is_good = ratio <= 1
                factor = tf.clip_by_value(safety * tf.pow(tf.maximum(ratio, 1e-10), -0.2), shrinks, grows)
                next_step = tf.where(is_good & (tried < step), tf.maximum(step, tried * factor), tried * factor)
                arrived = tf.where(tried < left, now + tried * direction, target)
                return tf.where(is_good, new, y), tf.where(is_good, arrived, now), next_step, count + 1

            def is_on_the_way(y, now, step, count):
                return (target - now) * direction > 0

            start = (*carry, tf.constant(0))
            y, now, step, count = tf.while_loop(is_on_the_way, step_on, start, maximum_iterations=limit)
            with tf.control_dependencies([tf.assert_equal(now, target, message="odeint: max_num_steps reached")]):
                return tf.identity(y), now, step

        found, _, _ = tf.scan(to, t[1:], (y0, t[0], tf.cast(first, t.dtype)))
        return tf.concat([y0[None], found], 0)


def odeint_fixed(func, y0, t, dt=None, method="rk4", name=None):
    """Solves dy/dt = func(y, t) with one step of a fixed method ("midpoint" or "rk4") between two times."""
    if method not in ("midpoint", "rk4") or dt is not None:
        raise ValueError("odeint_fixed: method has to be 'midpoint' or 'rk4', and dt is not available here.")
    with tf.name_scope(name, "odeint_fixed", [y0, t]):
        y0, t = tf.convert_to_tensor(y0), tf.convert_to_tensor(t, preferred_dtype=tf.float64)

        def step(y, times):
            now, size = times[0], tf.cast(times[1] - times[0], y.dtype)
            half = now + (times[1] - times[0]) / 2
            first = func(y, now)
            second = func(y + size * first / 2, half)
            if method == "midpoint":
                return y + size * second
            third = func(y + size * second / 2, half)
            fourth = func(y + size * third, times[1])
            return y + size * (first + 2 * second + 2 * third + fourth) / 6

        found = tf.scan(step, tf.stack([t[:-1], t[1:]], 1), y0)
        return tf.concat([y0[None], found], 0)
