"""How a case is written down: its variables, values, shapes and gradients. Runs under TensorFlow 1.15 and here."""

from __future__ import annotations

import collections
import inspect
import zlib

import numpy as np
import tensorflow as tf

CASES = {}
INPUTS = "inputs of a case"
CONFIG = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
CONFIG.graph_options.rewrite_options.disable_meta_optimizer = True  # graphs as small as these only cost time there

# A case's result if something must run several times: `update` is run `times` times, then `results` are taken.
Run = collections.namedtuple("Run", "update times results")
Run.__new__.__defaults__ = (3, ())


def case(key, function, values=True):
    """Adds a case.

    Args:
      key: "names: what is special"; the names are `<module>.<name>` below `tf.contrib`, or below `tf`.
      function: makes the graph, and returns tensors in any structure, or a `Run`.
      values: whether values and gradients are compared, not just shapes, dtypes and variables.
    """
    while key in CASES:
        key += "+"
    CASES[key] = (function, values)


def wrong(key, function):
    """Adds a case with bad arguments: both have to raise an error of the same type."""
    case(key + " !", function)


def rand(key):
    """Random numbers that only depend on a text."""
    return np.random.RandomState(zlib.crc32(key.encode()) & 0xFFFFFFFF)


def x(*shape, **options):
    """A float tensor to differentiate by: `seed` makes others of the same shape, `low` and `high` bound it."""
    shape = tuple(int(size) for size in shape)
    source = rand("x{}{}".format(shape, options.get("seed", "")))
    if "low" in options:
        value = source.uniform(options["low"], options["high"], shape)
    else:
        value = source.standard_normal(shape)
    tensor = tf.constant(value, options.get("dtype", tf.float32))
    tf.add_to_collection(INPUTS, tensor)
    return tensor


def ids(*shape, **options):
    """Whole numbers from 0 to below `below`."""
    source = rand("ids{}{}".format(shape, options.get("seed", "")))
    return tf.constant(source.randint(0, options.get("below", 4), shape), options.get("dtype", tf.int32))


def unknown(tensor, *shape):
    """The tensor with only a part of its shape known while the graph is made (a Dimension of None is not known)."""
    return tf.placeholder_with_default(tensor, shape or [None] * tensor.shape.ndims)


def flat(result, path=""):
    """(path, leaf) of a structure."""
    if isinstance(result, tf.SparseTensor):
        result = collections.OrderedDict(indices=result.indices, values=result.values, shape=result.dense_shape)
    elif isinstance(result, tf.IndexedSlices):
        result = collections.OrderedDict(indices=result.indices, values=result.values)
    elif isinstance(result, tf.TensorArray):
        result = result.stack()
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        result = collections.OrderedDict(zip(result._fields, result))
    if isinstance(result, dict):
        return [leaf for key in sorted(result, key=str) for leaf in flat(result[key], f"{path}/{key}")]
    if isinstance(result, (list, tuple)):
        return [leaf for place, each in enumerate(result) for leaf in flat(each, f"{path}/{place}")]
    return [(path or "/", result)]


def static(tensor):
    """The type and shape that are known while the graph is made."""
    shape = tensor.shape.as_list() if tensor.shape.ndims is not None else None
    return f"{tensor.dtype.base_dtype.name} {shape}"


def names(items):
    """The names of operations, tensors or variables."""
    return [each.name for each in items]


def named(variable):
    """Returns its name in checkpoints."""
    return variable.name.rsplit(":", 1)[0]


def is_tensor(leaf):
    return isinstance(leaf, (tf.Tensor, tf.Variable)) or hasattr(leaf, "_as_graph_element")


def record(function, values):
    """Returns the results of a case: name -> value. An error is its type's name under `error`."""
    found = {}
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        try:
            _record(function(), values, found)
        except Exception as error:
            found["error"] = type(error).__name__
            found["message"] = f"{type(error).__name__}: {error}"[:600]
    return found


def _record(result, values, found):
    run = result if isinstance(result, Run) else None
    leaves = flat((run.update, run.results) if run else result)
    tensors = [(path, leaf) for path, leaf in leaves if is_tensor(leaf) and not isinstance(leaf, tf.Operation)]
    for path, leaf in leaves:
        if isinstance(leaf, tf.Operation):
            continue
        if is_tensor(leaf):
            found["static " + path] = static(leaf)
        elif isinstance(leaf, (np.ndarray, np.generic, float, int)):
            found["value " + path] = np.asarray(leaf)
        else:
            found["value " + path] = str(leaf)
    variables = list(collections.OrderedDict.fromkeys(tf.global_variables() + tf.local_variables()))
    trainable = tf.trainable_variables()
    if not run:
        loss, wanted = _loss(tensors) if values else (None, [])
        wrt = [("by " + named(var), var) for var in trainable]
        wrt += [(f"by input {place}", each) for place, each in enumerate(tf.get_collection(INPUTS))]
        gradients = tf.gradients(loss, [each for _, each in wrt]) if loss is not None and wrt else []
        gradients = [(name, dense(each)) for (name, _), each in zip(wrt, gradients)]
        found.update({name: "no gradient" for name, each in gradients if each is None})
        gradients = [(name, each) for name, each in gradients if each is not None]
    ops = [leaf for _, leaf in leaves if isinstance(leaf, tf.Operation)]
    if not (variables or tensors or ops):
        return
    with tf.Session(config=CONFIG) as session:
        if variables or tf.get_collection(tf.GraphKeys.TABLE_INITIALIZERS):
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer(), tf.tables_initializer()])
        own = collections.OrderedDict()
        for var, first in zip(variables, session.run(variables)):
            found["variable " + named(var)] = "{}{}{}".format(
                static(var), " trainable" if var in trainable else "",
                f" = {np.ravel(first)[0]:.6g}" if is_same(first) else "",
            )  # fmt: skip
            if (
                var.dtype.base_dtype.is_floating
                and (var in trainable or not is_same(first))
                and (isinstance(var.initializer, tf.Operation))
            ):
                own[var] = rand(named(var)).standard_normal(first.shape).astype(first.dtype) * first.dtype.type(0.5)
        session.run([var.initializer for var in own], {var.initializer.inputs[1]: value for var, value in own.items()})
        if run:
            for step in range(run.times):
                update = [(path, each) for path, each in flat(run.update) if is_tensor(each)]
                for (path, each), value in zip(update, session.run([each for _, each in update])):
                    if not isinstance(each, tf.Operation):
                        found[f"step {step} {path}"] = value
            results = [(path, each) for path, each in flat(run.results, "results") if is_tensor(each)]
            results += [("after " + named(var), var) for var in variables]
        elif values:
            session.run(ops)
            results = [("value " + path, each) for path, each in tensors] + gradients
        else:
            results = []
        for (path, _), value in zip(results, session.run([each for _, each in results])):
            found[path] = np.asarray(value)


def _loss(tensors):
    """The sum of all float tensors with fixed random weights, or None."""
    parts = []
    for path, each in tensors:
        if each.dtype.base_dtype.is_floating:
            shape = tf.shape(each)
            size = tf.cast(tf.reduce_prod(shape), tf.float32)
            weights = tf.reshape(tf.cos(tf.range(size) * 1.7 + zlib.crc32(path.encode()) % 7), shape)
            parts.append(tf.reduce_sum(tf.cast(each, tf.float32) * weights))
    return (tf.add_n(parts), tensors) if parts else (None, [])


def dense(gradient):
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def is_same(value):
    shape, value = np.shape(value), np.ravel(value)
    return value.dtype.kind in "fiub" and (value.size > 1 or not shape) and bool((value == value[0]).all())


def signature(thing):
    """The arguments of a function or constructor with their defaults as texts; None where Python does not know."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    return [each.name if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) else "*" for each in parameters], {
        each.name: _default(each.default) for each in parameters if each.default is not each.empty
    }


def _default(value):
    if isinstance(value, (bool, int, float, str, type(None), tuple, list)):
        return repr(value)
    return getattr(value, "name", None) or getattr(value, "__name__", None) or type(value).__name__
