"""Canaries of `npu_bridge/base/tf_internals/profiles.py`."""

from __future__ import annotations

import time

import tensorflow as tf

from npu_bridge.base.tf_internals import profiles
from npu_bridge.graph.recorded import events_of
from tests.canaries import canary_of, expect


@canary_of(profiles.watch_calls, profiles.collected_graphs, eagerly=True)
def _():
    called = []

    def around(function, call):
        called.append(function.graph)
        return call()

    profiles.watch_calls(around)
    inner = tf.function(lambda matrix: matrix @ matrix)
    outer = tf.function(lambda matrix: tf.reduce_sum(inner(matrix)))
    with profiles.collected_graphs() as graphs:
        expect(float(outer(tf.ones([2, 2]))) == 8.0, "the call gives another result")
    expect(len(called) == 1 and called[0].building_function, "other calls than the eager one are passed on")
    expect(any("MatMul" in node.op for graph in graphs for node in graph.node), "the graph is not collected")
    with profiles.collected_graphs() as graphs:
        outer(tf.ones([2, 2]))
    expect(graphs == [], "a graph is collected that was already optimized")


@canary_of(profiles.CpuProfile, eagerly=True)
def _():
    function = tf.function(lambda matrix: matrix @ matrix + 1.0)
    function(tf.ones([2, 2]))
    profile = profiles.CpuProfile()
    begin = time.time()
    for number in (7, 8):
        with profile.step(number):
            function(tf.ones([2, 2]))
    function(tf.ones([2, 2]))
    end = time.time()
    steps = profile.stop()
    expect(list(steps) == [7, 8], f"steps {list(steps)} are recorded")
    for stats in steps.values():
        events = list(events_of(stats))
        kinds = [node.timeline_label for node in stats.dev_stats[0].node_stats]
        expect(sum("MatMul" in kind for kind in kinds) == 1, f"the operators are {kinds}")
        expect(all(begin - 1 < event.begin / 1e6 <= event.end / 1e6 < end + 1 for event in events), "another clock")
