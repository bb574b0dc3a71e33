"""`tf.contrib.framework` and `graph_editor`: variables of models, argument scopes, checks, graphs."""

from __future__ import annotations

# fmt: off
# A table: a line for each case, if it fits.
import collections
import os
import tempfile

import numpy as np
import tensorflow as tf
from common import case, names, unknown, wrong, x

framework, ge = tf.contrib.framework, tf.contrib.graph_editor


# Variables of models.
def model():
    with tf.variable_scope("a"):
        framework.model_variable("w", [2], initializer=tf.ones_initializer(),
            regularizer=lambda w: tf.reduce_sum(w) * 0.1)
        framework.variable("b", [2], trainable=False, collections=["own", tf.GraphKeys.GLOBAL_VARIABLES])
    framework.local_variable(1.0, name="local")
    framework.global_variable(2.0, name="global")
    framework.add_model_variable(tf.get_variable("late", [1]))
    framework.get_or_create_global_step()


def listed(call):
    def run():
        model()
        return call()

    return run


for _name, _arguments in (
    ("get_variables", ()), ("get_variables", ("a",)), ("get_variables", (None, "w")), ("get_model_variables", ()),
    ("get_trainable_variables", ()), ("get_local_variables", ()), ("get_variables_by_name", ("w",)),
    ("get_variables_by_suffix", ("w",)), ("get_variables_to_restore", (["a"], ["a/b"])),
):
    case(f"framework.{_name} slim.{_name}: {_arguments}", listed(lambda n=_name, a=_arguments: names(
        getattr(framework, n)(*a))))
for _name in ("model_variable", "variable", "local_variable", "global_variable", "add_model_variable",
              "get_or_create_global_step"):
    case(f"framework.{_name} slim.{_name}", listed(
        lambda: [tf.identity(each) for each in tf.losses.get_regularization_losses()]))
case("framework.get_unique_variable slim.get_unique_variable", listed(lambda: framework.get_unique_variable("a/w")))
wrong("framework.get_unique_variable", listed(lambda: framework.get_unique_variable("x")))
case("framework.get_variable_full_name slim.get_variable_full_name", listed(
    lambda: framework.get_variable_full_name(framework.get_unique_variable("a/w"))))
case("framework.filter_variables slim.filter_variables", listed(lambda: names(framework.filter_variables(
    tf.global_variables(), ["a/.*"], ["b"]))))
case("framework.get_global_step framework.create_global_step framework.assert_global_step "
     "framework.assert_or_get_global_step slim.get_global_step slim.create_global_step slim.assert_global_step "
     "slim.assert_or_get_global_step slim.get_or_create_global_step", lambda: [
         framework.create_global_step(), framework.get_global_step(), framework.assert_or_get_global_step(),
         framework.assert_global_step(framework.get_global_step())])
wrong("framework.create_global_step", lambda: [framework.create_global_step() for _ in range(2)])
case("framework.VariableDeviceChooser slim.VariableDeviceChooser", lambda: [
    framework.VariableDeviceChooser(2)(tf.constant(1).op) for _ in range(2)])
for _name in ("assign_from_values", "assign_from_values_fn"):
    case(f"framework.{_name} slim.{_name}", listed(lambda n=_name: assigned(n)))


def assigned(name):
    result = getattr(framework, name)({"a/w": np.array([3.0, 4.0], np.float32)})
    op, feeds = result if name == "assign_from_values" else (None, None)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(op, feeds) if op is not None else result(session)
        return session.run("a/w:0")


def checkpointed(use):
    folder = tempfile.mkdtemp()
    with tf.Graph().as_default(), tf.Session() as session:
        tf.get_variable("w", initializer=[1.0, 2.0])
        tf.get_variable("b", initializer=3)
        session.run(tf.global_variables_initializer())
        path = tf.train.Saver().save(session, os.path.join(folder, "m"))
    return use(path)


def restored(path, **options):
    w = tf.get_variable("own", [2])
    call = framework.assign_from_checkpoint_fn(path, {"w": w}, **options)
    op, feeds = framework.assign_from_checkpoint(path, {"w": w})
    with tf.Session() as session:
        call(session)
        first = session.run(w)
        session.run(op, feeds)
        return first, session.run(w)


case("framework.assign_from_checkpoint framework.assign_from_checkpoint_fn slim.assign_from_checkpoint "
     "slim.assign_from_checkpoint_fn", lambda: checkpointed(restored))
case("framework.list_variables framework.load_checkpoint framework.load_variable", lambda: checkpointed(lambda path: [
    framework.list_variables(path), framework.load_variable(path, "w"),
        framework.load_checkpoint(path).get_tensor("b")]))
case("framework.init_from_checkpoint", lambda: checkpointed(lambda path: started(path)))


def started(path):
    w = tf.get_variable("own", [2])
    framework.init_from_checkpoint(path, {"w": "own"})
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return str(session.run(w))


# Argument scopes.
@framework.add_arg_scope
def scoped(a, b=1, c=2):
    return a, b, c


def scopes():
    with framework.arg_scope([scoped], b=5) as first:
        with framework.arg_scope([scoped], c=6):
            inner = scoped(0), scoped(0, b=7), framework.has_arg_scope(scoped)
        again = scoped(1)
    with framework.arg_scope(first):
        return inner, again, scoped(2), len(framework.current_arg_scope(
            )), sorted(framework.arg_scoped_arguments(scoped))


case("framework.arg_scope framework.add_arg_scope framework.has_arg_scope framework.current_arg_scope "
     "framework.arg_scoped_arguments slim.add_arg_scope slim.has_arg_scope slim.current_arg_scope "
     "slim.arg_scoped_arguments",
     scopes)
wrong("framework.arg_scope", lambda: framework.arg_scope([lambda: 3], b=5).__enter__())

# Checks.
case("framework.with_shape", lambda: [framework.with_shape([2, 3], x(2, 3)), framework.with_shape(
    [2, 3], unknown(x(2, 3))), framework.with_shape(
        tf.constant([2, 3]), unknown(x(2, 3))), framework.with_shape(unknown(tf.constant([2, 3])), unknown(x(2, 3))),
            framework.with_shape([2, 3], unknown(x(2, 3), None, 3))])
case("framework.with_same_shape", lambda: [framework.with_same_shape(x(2, 3), unknown(x(2, 3))),
                                           framework.with_same_shape(unknown(x(2, 3), None, 3), x(2, 3))])
wrong("framework.with_shape", lambda: framework.with_shape([2, 4], x(2, 3)))
wrong("framework.with_shape: later", lambda: framework.with_shape([2, 4], unknown(x(2, 3))))
wrong("framework.with_shape: partly", lambda: framework.with_shape([None, 3], unknown(x(2, 3))))
wrong("framework.with_shape: type", lambda: framework.with_shape([2.5, 4], unknown(x(2, 3))))
case("framework.assert_same_float_dtype", lambda: framework.assert_same_float_dtype([x(2)]).name)
wrong("framework.assert_same_float_dtype", lambda: framework.assert_same_float_dtype([x(2), tf.constant(1)]))
case("framework.assert_scalar framework.assert_scalar_int", lambda: [framework.assert_scalar(tf.constant(1.0)),
                                                                     framework.assert_scalar_int(tf.constant(2))])
wrong("framework.assert_scalar", lambda: framework.assert_scalar(x(2)))
wrong("framework.assert_scalar_int", lambda: framework.assert_scalar_int(tf.constant(1.0)))
case("framework.convert_to_tensor_or_sparse_tensor", lambda: [
    framework.convert_to_tensor_or_sparse_tensor([1, 2]), framework.convert_to_tensor_or_sparse_tensor(
        tf.SparseTensorValue([[0, 1]], [2.0], [2, 3]))])
wrong("framework.convert_to_tensor_or_sparse_tensor", lambda: framework.convert_to_tensor_or_sparse_tensor(
    tf.SparseTensorValue([[0, 1]], [2.0], [2, 3]), tf.int32))
case("framework.reduce_sum_n", lambda: [framework.reduce_sum_n([x(2), x(3)]), framework.reduce_sum_n([x(2, 3)])])
wrong("framework.reduce_sum_n", lambda: framework.reduce_sum_n([]))
case("framework.remove_squeezable_dimensions", lambda: [framework.remove_squeezable_dimensions(x(3, 1), x(3)),
                                                        framework.remove_squeezable_dimensions(x(3), x(3, 1))])
case("framework.smart_cond framework.smart_constant_value", lambda: [
    framework.smart_cond(True, lambda: 1, lambda: 2), framework.smart_cond(tf.constant(False), lambda: 1, lambda: 2),
    framework.smart_cond(unknown(tf.constant(True)), lambda: tf.constant(1), lambda: tf.constant(2)),
    framework.smart_constant_value(tf.constant(True)), framework.smart_constant_value(False)])
wrong("framework.smart_cond", lambda: framework.smart_cond(True, 3, 4))
case("framework.sort framework.argsort", lambda: [framework.sort(x(5)), framework.argsort(x(5),
    direction="DESCENDING")])
case("framework.is_tensor", lambda: [framework.is_tensor(each) for each in (x(2), tf.get_variable("v", [1]), 3,
    [x(1)])])
case("framework.get_graph_from_inputs", lambda: framework.get_graph_from_inputs([x(2)]) is tf.get_default_graph())
case("framework.get_name_scope", lambda: named())
case("framework.TensorSpec framework.BoundedTensorSpec", lambda: [framework.TensorSpec([2], name="a").name, (
    framework.BoundedTensorSpec([2], tf.float32, 0.0, [1.0, 2.0]).maximum)])
case("framework.fuse_op", lambda: fused())
case("framework.deprecated framework.deprecated_args framework.deprecated_arg_values", lambda: [
    framework.deprecated("2020-01-01", "x")(lambda: 1)(), framework.deprecated_args("2020-01-01", "x", "a")(
        lambda a=1: a)(a=2), framework.deprecated_arg_values("2020-01-01", "x", a=1)(lambda a=1: a)(a=1)])


def named():
    with tf.name_scope("a"), tf.name_scope("b"):
        return framework.get_name_scope()


def fused():
    a = tf.placeholder(tf.float32, [2], name="a")
    tf.identity(tf.tanh(tf.add(a, a, name="b"), name="c"), name="d")
    graph = framework.fuse_op(tf.get_default_graph().as_graph_def(), ["a"], ["c"], [tf.float32.as_datatype_enum],
        False, "f", "Own")
    return [[node.name, node.op, list(node.input), sorted(node.attr)] for node in graph.node]


# The graph editor.
def chain():
    a = tf.constant([1.0, 2.0], name="a")
    with tf.name_scope("inner"):
        b = tf.maximum(a, 1.5, name="b")
        c = tf.multiply(b, b, name="c")
    return a, b, c, tf.subtract(c, a, name="d")


def edited(function):
    return lambda: function(*chain())


_GE = (
    ("get_backward_walk_ops", lambda a, b, c, d: sorted(names(ge.get_backward_walk_ops(c.op)))),
    ("get_backward_walk_ops", lambda a, b, c, d: names(ge.get_backward_walk_ops([c], inclusive=False, stop_at_ts=[b]))),
    ("get_forward_walk_ops", lambda a, b, c, d: sorted(names(ge.get_forward_walk_ops(a.op)))),
    ("get_forward_walk_ops", lambda a, b, c, d: names(ge.get_forward_walk_ops([b], within_ops=[b.op, c.op]))),
    ("get_walks_intersection_ops", lambda a, b, c, d: sorted(names(ge.get_walks_intersection_ops([b.op], [c.op])))),
    ("get_within_boundary_ops", lambda a, b, c, d: sorted(names(ge.get_within_boundary_ops(
        tf.get_default_graph(), c.op, [a.op])))),
    ("select_ops", lambda a, b, c, d: sorted(names(ge.select_ops("^inner/", graph=tf.get_default_graph())))),
    ("select_ts", lambda a, b, c, d: sorted(names(ge.select_ts("^inner/c", graph=tf.get_default_graph())))),
    ("filter_ops", lambda a, b, c, d: sorted(names(ge.filter_ops(tf.get_default_graph(),
        lambda op: op.type == "Mul")))),
    ("filter_ops_from_regex", lambda a, b, c, d: sorted(names(ge.filter_ops_from_regex(tf.get_default_graph(),
        "^inn")))),
    ("filter_ts", lambda a, b, c, d: sorted(names(ge.filter_ts(tf.get_default_graph(), lambda t: "c" in t.name)))),
    ("filter_ts_from_regex", lambda a, b, c, d: sorted(names(ge.filter_ts_from_regex(tf.get_default_graph(), "b:0")))),
    ("make_list_of_op", lambda a, b, c, d: names(ge.make_list_of_op([a.op, b.op]))),
    ("make_list_of_t", lambda a, b, c, d: names(ge.make_list_of_t([a, b]))),
    ("sgv SubGraphView make_view", lambda a, b, c, d: view(ge.sgv(b.op, c.op))),
    ("make_view", lambda a, b, c, d: view(ge.make_view([b.op, c.op]))),
    ("sgv_scope", lambda a, b, c, d: view(ge.sgv_scope("inner", tf.get_default_graph()))),
    ("copy TransformerInfo", lambda a, b, c, d: copied(ge.copy(ge.sgv(b.op, c.op), dst_scope="new"), c)[:1]),
    ("copy_with_input_replacements", lambda a, b, c, d: copied(ge.copy_with_input_replacements(
        ge.sgv(b.op, c.op), {a: a * 3.0}, dst_scope="new"), c)),
    ("graph_replace", lambda a, b, c, d: ge.graph_replace(d, {a: a + 5.0})),
    ("graph_replace", lambda a, b, c, d: ge.graph_replace([d, c], {b: a * 7.0}, dst_scope="new")),
    ("graph_replace", lambda a, b, c, d: ge.graph_replace({"x": d, "y": c}, {b: a * 7.0})),
    ("reroute_ts", lambda a, b, c, d: [ge.reroute_ts([a * 9.0], [b]), c, d]),
    ("reroute_ts", lambda a, b, c, d: [ge.reroute_ts([a * 9.0], [a], can_modify=[d.op]), c, d]),
    ("swap_ts", lambda a, b, c, d: [ge.swap_ts([a], [b], cannot_modify=[b.op]), c, d]),
    ("graph_replace", lambda a, b, c, d: sorted(ge.graph_replace(
        collections.OrderedDict(y=d, x=c), {b: a * 7.0}).items())),
    ("get_walks_intersection_ops", lambda a, b, c, d: names(ge.get_walks_intersection_ops([a.op], [d.op],
        within_ops=[a.op, d.op, c.op]))),
    ("get_walks_union_ops", lambda a, b, c, d: sorted(names(ge.get_walks_union_ops([c.op], [b.op])))),
    ("get_ops_ios check_cios", lambda a, b, c, d: [sorted(names(ge.get_ops_ios(b.op))), ge.check_cios(True)]),
    ("compute_boundary_ts", lambda a, b, c, d: [names(each) for each in ge.compute_boundary_ts([b.op, c.op])]),
    ("get_name_scope_ops", lambda a, b, c, d: sorted(names(ge.get_name_scope_ops(tf.get_default_graph(), "inner")))),
    ("select_ops_and_ts", lambda a, b, c, d: [sorted(names(each)) for each in ge.select_ops_and_ts(
        "^inner/", "(?#ts)^d", graph=tf.get_default_graph())]),
    ("can_be_regex make_regex", lambda a, b, c, d: [ge.can_be_regex("a"), ge.can_be_regex(3), (
        ge.make_regex("a+").pattern)]),
    ("ControlOutputs", lambda a, b, c, d: [ge.add_control_inputs(d.op, [b.op]), sorted((op.name, names(then))
        for op, then in ge.ControlOutputs(tf.get_default_graph()).get_all().items())]),
    ("get_tensors get_generating_ops get_consuming_ops", lambda a, b, c, d: [sorted(names(found)) for found in (
        ge.get_tensors(tf.get_default_graph()), ge.get_generating_ops([b, c]), ge.get_consuming_ops([b]))]),
    ("placeholder_name make_placeholder_from_tensor make_placeholder_from_dtype_and_shape", lambda a, b, c, d: [
        ge.placeholder_name(b), ge.placeholder_name(b, "to"), ge.placeholder_name(None, "to"), names([
            ge.make_placeholder_from_tensor(b), ge.make_placeholder_from_dtype_and_shape(tf.int32, [2])])]),
    ("make_view_from_scope SubGraphView", lambda a, b, c, d: [[view(each) for each in (
        ge.make_view_from_scope("inner", tf.get_default_graph()), ge.sgv(b.op, c.op, d.op).remap([0], [0, d]),
        ge.sgv(b.op).remap_outputs_to_consumers())], [sorted(names(each.remove_unused_ops().ops)) for each in (
            ge.sgv(b.op, c.op, d.op).remap_outputs([]), ge.sgv(tf.get_default_graph()).remap_outputs([]), ge.sgv(
                a.op, b.op, c.op).remap_outputs([0]))]]),
    ("add_control_inputs", lambda a, b, c, d: [ge.add_control_inputs(d.op, [b.op]), names(d.op.control_inputs)]),
    ("remove_control_inputs", lambda a, b, c, d: [ge.add_control_inputs(d.op, [b.op]), ge.remove_control_inputs(
        d.op, [b.op]), names(d.op.control_inputs)]),
)
for _name, _function in _GE:
    case(" ".join("graph_editor." + each for each in _name.split()), edited(_function))
wrong("graph_editor.graph_replace", edited(lambda a, b, c, d: ge.graph_replace(a, {d: b})))
wrong("graph_editor.reroute_ts", edited(lambda a, b, c, d: ge.reroute_ts([a, b], [c])))
wrong("graph_editor.make_list_of_op", edited(lambda a, b, c, d: ge.make_list_of_op([a])))


def view(given):
    return [sorted(names(given.ops)), sorted(names(given.inputs)), sorted(names(given.outputs))]


def copied(result, tensor):
    new, info = result
    return [sorted(names(new.ops)), info.transformed(tensor)]
