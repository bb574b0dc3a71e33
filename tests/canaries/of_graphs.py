"""Canaries of `npu_bridge/base/tf_internals/graphs.py`."""

from __future__ import annotations

import threading

import tensorflow as tf

from npu_bridge.base.tf_internals import graphs
from tests.canaries import canary_of, expect
from tests.session.precision.small_models import classic_loops

v1 = tf.compat.v1


@canary_of(graphs.allow_graph_changes)
def _():
    graph = v1.get_default_graph()
    graph.finalize()
    with graphs.allow_graph_changes(graph):
        tf.no_op()
    expect(graph.finalized, "the graph stayed open")
    export = threading.Thread(target=graph.as_graph_def)
    with graphs.allow_graph_changes(graph):
        export.start()
        export.join(0.2)
        expect(export.is_alive(), "the graph was exported while it could change")
    export.join()


@canary_of(graphs.update_input)
def _():
    op = tf.identity(tf.constant(1.0)).op
    graphs.update_input(op, 0, tf.constant(2.0))
    with v1.Session() as session:
        expect(session.run(op.outputs[0]) == 2.0, "the operator reads its old input")


@canary_of(graphs.add_control_inputs, graphs.remove_control_inputs, graphs.control_outputs)
def _():
    first, second = tf.no_op(), tf.no_op()
    graphs.add_control_inputs(second, [first])
    expect(second.control_inputs == [first] and graphs.control_outputs(first) == [second], "nothing waits")
    graphs.remove_control_inputs(second)
    expect(second.control_inputs == [], "the operator still waits")


@canary_of(graphs.set_attribute)
def _():
    op = tf.no_op()
    graphs.set_attribute(op, "_canary", v1.AttrValue(i=3))
    expect(op.node_def.attr["_canary"].i == 3, "the attribute is not there")


@canary_of(graphs.make_stand_in_variable, graphs.original_variable_of, graphs.owner_of_slots)
def _():
    for use_resource in (True, False):
        original = v1.get_variable(f"original_{use_resource}", [2], tf.float16, use_resource=use_resource)
        values = v1.Variable(tf.zeros([2]), use_resource=True)
        made = graphs.make_stand_in_variable(original, values, tf.float32, shares_slots=True)
        optimizer = v1.train.AdamOptimizer(0.1)
        step = optimizer.apply_gradients([(tf.ones([2]), made)])
        expect(made.name == original.name and made.dtype == tf.float32, "it has not that name")
        expect(
            graphs.original_variable_of(made) is original and graphs.owner_of_slots(made) is original, "it is forgotten"
        )
        expect(optimizer.get_slot(original, "m") is optimizer.get_slot(made, "m"), "their slots are not the same")
        keyless = graphs.make_stand_in_variable(original, values, tf.float32, shares_slots=False)
        expect(graphs.owner_of_slots(keyless) is keyless, "slots would be looked for at the original")
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(step)
            expect(session.run(values)[0] < 0 and session.run(made.value())[0] < 0, "the values are not those")


@canary_of(graphs.set_attributes_of_new_operators)
def _():
    with graphs.set_attributes_of_new_operators(v1.get_default_graph(), {"_canary": v1.AttrValue(i=3)}):
        op = tf.no_op()
    expect(op.get_attr("_canary") == 3, "the operator has no such attribute")


@canary_of(graphs.is_reference)
def _():
    variable = v1.get_variable("v", [], use_resource=False)
    expect(graphs.is_reference(variable.op.outputs[0].dtype), "a reference is not known")
    expect(not graphs.is_reference(tf.float32), "every dtype is a reference")


@canary_of(
    graphs.control_flow_context,
    graphs.current_control_flow_context,
    graphs.enter_control_flow_context,
    graphs.bring_into_context,
)
def _():
    graph, found = v1.get_default_graph(), []
    outside = tf.constant(1.0)

    def branch():
        found.append(graphs.current_control_flow_context(graph))
        return tf.constant(2.0)

    with classic_loops():
        v1.cond(v1.placeholder(tf.bool, []), branch, lambda: tf.constant(3.0))
    (context,) = found
    with graphs.enter_control_flow_context(graph, context):
        op = tf.no_op()
    expect(context is not None and graphs.control_flow_context(op) is context, "an operator is not in its branch")
    expect(graphs.current_control_flow_context(graph) is None, "the branch was not left")
    expect(graphs.bring_into_context(context, outside).op.type == "Switch", "a tensor was not switched")


@canary_of(graphs.contexts_around, graphs.disable_parallel_iterations)
def _():
    found, limit = [], tf.constant(3)

    def body(i):
        found.append(i + limit - 2)
        return found[-1]

    with classic_loops():
        v1.while_loop(lambda i: i < limit, body, [tf.constant(0)])
    op = found[0].op
    graphs.disable_parallel_iterations(op)
    (loop,) = graphs.contexts_around(graphs.control_flow_context(op))
    enters = [other for other in op.graph.get_operations() if other.type == "Enter"]
    at_once = [other.get_attr("parallel_iterations") for other in enters]
    expect(loop.parallel_iterations == 1 and len(enters) > 1 and set(at_once) == {1}, f"at once go {at_once}")


@canary_of(graphs.enclosing_branches, graphs.allow_fetching)
def _():
    found, is_training = [], v1.placeholder(tf.bool, [])

    def branch():
        found.append(tf.constant(2.0))
        return tf.while_loop(lambda i: i < 1.0, lambda i: found.append(i + 1.0) or found[-1], [found[0]])

    with classic_loops():
        v1.cond(is_training, lambda: tf.constant(3.0), branch)
    inside, in_loop = (list(graphs.enclosing_branches(tensor.op)) for tensor in found)
    ((decides, is_branch),) = inside
    expect(decides.op.inputs[0] is is_training and not is_branch, f"the branch is {inside}")
    expect(in_loop == [(None, False), *inside], f"the loop in it is {in_loop}")
    graph = found[0].graph
    was = graph.is_fetchable(found[0])
    graphs.allow_fetching(found[0].op)
    expect(not was and graph.is_fetchable(found[0]), "what is inside a condition cannot be fetched")


@canary_of(graphs.is_branch_or_body)
def _():
    found = []

    @tf.function(autograph=False)
    def function():
        found.append(graphs.is_branch_or_body(v1.get_default_graph()))
        return tf.cond(tf.constant(True), branch, branch)

    def branch():
        found.append(graphs.is_branch_or_body(v1.get_default_graph()))
        return tf.constant(1.0)

    function.get_concrete_function()
    expect(found == [False, True, True], f"functions and branches are {found}")


@canary_of(graphs.run_in_any_order, eagerly=True)
def _():
    @tf.function(autograph=False)
    def step():
        first, _ = [tf.raw_ops.Assert(condition=True, data=[tf.constant(number)]) for number in (1, 2)]
        graphs.run_in_any_order(first)
        return tf.constant(1.0)

    graph = step.get_concrete_function().graph
    first, second = (op for op in graph.get_operations() if op.type == "Assert")
    expect({first, second} <= set(graph.control_outputs), "an operator is not run")
    expect(first not in second.control_inputs, "the operators run in an order")


@canary_of(graphs.is_compiled_by_xla, eagerly=True)
def _():
    found = []

    def step():
        found.append(graphs.is_compiled_by_xla(v1.get_default_graph()))
        return tf.constant(1.0)

    for is_compiled in (False, True):
        tf.function(step, autograph=False, jit_compile=is_compiled)()
    expect(found == [False, True], f"compiled functions are {found}")


@canary_of(graphs.function_definition, graphs.function_definitions)
def _():
    graph = v1.get_default_graph()
    tf.function(lambda: tf.constant(1.0) + tf.random.uniform([]), autograph=False)()
    (name,) = {op.get_attr("f").name for op in graph.get_operations() if op.type == "StatefulPartitionedCall"}
    expect(graphs.function_definition(graph, "canary") is None, "a function was found that is not there")
    types_in = {node.op for node in graphs.function_definition(graph, name).node_def}
    expect("RandomUniform" in types_in, f"the function holds {types_in}")
    expect(name in {each.signature.name for each in graphs.function_definitions(graph)}, "a function is missing")


@canary_of(graphs.operator_definition)
def _():
    expect(graphs.operator_definition("MatMul").input_arg[0].name == "a", "MatMul has another definition")
    expect(graphs.operator_definition("Canary") is None, "there is a definition of everything")


@canary_of(graphs.read_tensor, graphs.set_read_tensor)
def _():
    variable = v1.get_variable("v", [], use_resource=True)
    expect(isinstance(graphs.read_tensor(variable), tf.Tensor), "a variable has no tensor that reads it")
    expect(graphs.read_tensor(0.5) == 0.5, "a number is not a number")
    value = tf.constant(7.0)
    graphs.set_read_tensor(variable, value)
    with v1.Session() as session:
        expect(session.run(variable) == 7.0, "a fetch reads something else")


@canary_of(graphs.unique_id, graphs.shared_name)
def _():
    one, other = (v1.get_variable(name, [], use_resource=True) for name in ("a", "b"))
    expect(graphs.unique_id(one) != graphs.unique_id(other), "two variables have one id")
    expect(graphs.shared_name(one) == "a", "the name has changed")


@canary_of(graphs.has_kernel)
def _():
    expect(graphs.has_kernel("MatMul", tf.bfloat16, "CPU"), "products have no kernel in bfloat16")
    expect(not graphs.has_kernel("BlockLSTM", tf.int32, "CPU"), "every operator has a kernel in every dtype")
    expect(not graphs.has_kernel("NoSuchOperator", tf.float32, "CPU"), "an operator that does not exist has a kernel")


@canary_of(graphs.set_variable_name)
def _():
    variable = v1.get_variable("v", [], use_resource=True)
    info = tf.Variable.SaveSliceInfo("other", [], [], [])
    graphs.set_variable_name(variable, "other:0", info)
    expect(variable.name == "other:0", f"the variable is called {variable.name}")
    expect(variable._get_save_slice_info() is info, "savers do not see the name")


@canary_of(graphs.call_when_function_is_built, eagerly=True)
def _():
    seen, answers = [], []

    @tf.function
    def inner():
        answers.append(graphs.call_when_function_is_built(v1.get_default_graph(), lambda: seen.append("built")))
        return tf.constant(1.0)

    @tf.function
    def outer():
        value = inner()
        expect(not seen, "it was called before the outer function was complete")
        return value + tf.constant(1.0)

    outer.get_concrete_function()
    expect((answers, seen) == ([True], ["built"]), f"of two functions: {answers}, {seen}")
    with tf.Graph().as_default():
        tf.no_op()
        tf.function(inner.python_function).get_concrete_function()
    expect((answers, seen) == ([True, False], ["built"]), f"in a graph: {answers}, {seen}")
