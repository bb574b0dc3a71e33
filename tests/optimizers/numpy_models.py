"""Implements every rule again in numpy, a few lines each, for one tensor: the optimizers are compared with these.

A model is a function of (p, g, s, k, o): parameter, gradient, a dictionary that keeps its state, number of the update
from 1, and options. It returns the new parameter.
"""

from __future__ import annotations

import numpy as np


def sgd(p, g, s, k, o):
    g = g + o["weight_decay"] * p
    if o["momentum"] == 0:
        return p - o["learning_rate"] * g
    fresh = (1 - o["dampening"]) * g if k > 1 or o["first_velocity"] == "dampened" else g
    s["v"] = o["momentum"] * s.get("v", 0) + fresh
    return p - o["learning_rate"] * (g + o["momentum"] * s["v"] if o["nesterov"] else s["v"])


def rmsprop(p, g, s, k, o):
    g = g + (o["weight_decay"] * p if o["decay"] == "coupled" else 0)
    rest = o["weight_decay"] * p if o["decay"] == "decoupled_unscaled" else 0
    s["r"] = o["rho"] * s.get("r", o["initial_accumulator"]) + (1 - o["rho"]) * g**2
    s["a"] = o["rho"] * s.get("a", 0) + (1 - o["rho"]) * g
    r = s["r"] - s["a"] ** 2 if o["centered"] else s["r"]
    d = g / (np.sqrt(r + o["epsilon"]) if o["epsilon_inside"] else np.sqrt(r) + o["epsilon"])
    inner, outer = (o["learning_rate"], 1) if o["lr_in_momentum"] else (1, o["learning_rate"])
    s["b"] = o["momentum"] * s.get("b", 0) + inner * d
    return p - outer * s["b"] - rest


def adagrad(p, g, s, k, o):
    g = g + o["weight_decay"] * p
    s["h"] = s.get("h", o["initial_accumulator"]) + g**2
    root = np.sqrt(s["h"] + o["epsilon"]) if o["epsilon_inside"] else np.sqrt(s["h"]) + o["epsilon"]
    return p - o["learning_rate"] * g / root


def adadelta(p, g, s, k, o):
    g = g + o["weight_decay"] * p
    s["s"] = o["rho"] * s.get("s", 0) + (1 - o["rho"]) * g**2
    d = np.sqrt(s.get("a", 0) + o["epsilon"]) / np.sqrt(s["s"] + o["epsilon"]) * g
    s["a"] = o["rho"] * s.get("a", 0) + (1 - o["rho"]) * d**2
    return p - o["learning_rate"] * d


def _moments(g, s, o):
    s["m"] = o["beta_1"] * s.get("m", 0) + (1 - o["beta_1"]) * g
    s["v"] = o["beta_2"] * s.get("v", 0) + (1 - o["beta_2"]) * g**2
    return s["m"], s["v"]


def adam(p, g, s, k, o):
    rest = o["learning_rate"] * o["weight_decay"] * p if o["decay"] == "decoupled" else 0
    m, v = _moments(g + (o["weight_decay"] * p if o["decay"] == "coupled" else 0), s, o)
    if o["amsgrad"]:
        v = s["x"] = np.maximum(s.get("x", 0), v)
    c1, c2 = 1 - o["beta_1"] ** k, 1 - o["beta_2"] ** k
    if o["epsilon_placement"] == "tf":
        return p - o["learning_rate"] * np.sqrt(c2) / c1 * m / (np.sqrt(v) + o["epsilon"]) - rest
    return p - o["learning_rate"] * (m / c1) / (np.sqrt(v / c2) + o["epsilon"]) - rest


def lamb(p, g, s, k, o):
    m, v = _moments(g, s, o)
    if o["bias_correction"]:
        m, v = m / (1 - o["beta_1"] ** k), v / (1 - o["beta_2"] ** k)
    u = m / (np.sqrt(v) + o["epsilon"]) + o["weight_decay"] * p
    of_p, of_u = np.linalg.norm(p), np.linalg.norm(u)
    of_p = of_p if o["weight_norm_cap"] is None else min(of_p, o["weight_norm_cap"])
    return p - o["learning_rate"] * (of_p / of_u if of_p > 0 and of_u > 0 else 1) * u


def bert_adam(p, g, s, k, o):
    m, v = _moments(g, s, o)
    factor, total = 1, o["total_steps"]
    if total:
        x, w = (k - 1) / total, o["warmup"]
        after = {"linear": max((x - 1) / (w - 1), 0), "cosine": 0.5 * (1 + np.cos(np.pi * x)), "constant": 1}
        factor = x / w if x < w else {**after, "poly": max(1 - x, 0) ** 0.5}[o["schedule"]]
    return p - o["learning_rate"] * factor * (m / (np.sqrt(v) + o["epsilon"]) + o["weight_decay"] * p)


def adamp(p, g, s, k, o):
    m, v = _moments(g, s, o)
    m = o["beta_1"] * m + (1 - o["beta_1"]) * g if o["nesterov"] else m
    d = m / (1 - o["beta_1"] ** k) / (np.sqrt(v / (1 - o["beta_2"] ** k)) + o["epsilon"])
    factor = 1
    for axes in (tuple(range(p.ndim - 1)), None) if p.ndim > 1 else ():
        norm = lambda x: np.sqrt(np.sum(x**2, axes, keepdims=True))  # noqa: E731, B023
        cosine = np.abs(np.sum(g * p, axes, keepdims=True)) / (norm(g) + 1e-8) / (norm(p) + 1e-8)
        if cosine.max() < o["delta"] / np.sqrt(p.size / (p.shape[-1] if axes is not None else 1)):
            unit = p / (norm(p) + 1e-8)
            d, factor = d - unit * np.sum(unit * d, axes, keepdims=True), o["wd_ratio"]
            break
    return p - o["learning_rate"] * (d + o["weight_decay"] * factor * p)


def lars(p, g, s, k, o):
    of_p, of_g = np.linalg.norm(p), np.linalg.norm(g)
    bottom = of_g + o["weight_decay"] * of_p + o["epsilon"]
    rate = o["learning_rate"] * (o["trust"] * of_p / bottom if of_p > 0 and of_g > 0 else 1)
    g = g + o["weight_decay"] * p
    fresh = rate * g if o["lr_in_momentum"] else g
    s["v"] = o["momentum"] * s.get("v", 0) + fresh
    amount = fresh + o["momentum"] * s["v"] if o["nesterov"] else s["v"]
    return p - (amount if o["lr_in_momentum"] else rate * amount)


# One row for each rule: its model, and the arguments to try it with.
CASES = {
    "SGD": (
        sgd,
        [
            {},
            {"momentum": 0.9},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
            {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
            {"momentum": 0.9, "dampening": 0.3, "first_velocity": "gradient"},
        ],
    ),
    "RMSProp": (
        rmsprop,
        [
            {"weight_decay": 0.01},
            {"rho": 0.99, "epsilon_inside": False, "momentum": 0.9, "lr_in_momentum": False},
            {"epsilon": 1e-10, "momentum": 0.9, "centered": True, "weight_decay": 0.001, "decay": "decoupled_unscaled"},
            {"initial_accumulator": 1.0, "momentum": 0.5},
        ],
    ),
    "Adagrad": (adagrad, [{"weight_decay": 0.01}, {"initial_accumulator": 0.1, "epsilon_inside": False}]),
    "Adadelta": (adadelta, [{}, {"rho": 0.95, "weight_decay": 0.01}]),
    "Adam": (adam, [{}, {"epsilon_placement": "corrected", "weight_decay": 0.01}, {"amsgrad": True, "epsilon": 1e-4}]),
    "AdamW": (adam, [{}, {"weight_decay": 0.1, "epsilon_placement": "corrected", "amsgrad": True}]),
    "LAMB": (lamb, [{}, {"weight_decay": 0.1}, {"bias_correction": False, "weight_norm_cap": 0.5}]),
    "BertAdam": (
        bert_adam,
        [{"learning_rate": 0.01}]
        + [
            {"learning_rate": 0.01, "warmup": 0.1, "total_steps": 40, "schedule": name}
            for name in ("linear", "cosine", "constant", "poly")
        ],
    ),
    "AdamP": (adamp, [{"weight_decay": 0.01}, {"nesterov": True, "delta": 0.9, "weight_decay": 0.1}]),
    "LARS": (lars, [{"weight_decay": 0.01}, {"nesterov": True}, {"lr_in_momentum": False, "trust": 0.002}]),
}


def run(model, options, start, gradients):
    """Parameters after all gradients, for a list of tensors."""
    parameters, states = [np.array(p) for p in start], [{} for _ in start]
    for k, step in enumerate(gradients, 1):
        parameters = [model(p, g, s, k, options) for p, g, s in zip(parameters, step, states)]
    return parameters
