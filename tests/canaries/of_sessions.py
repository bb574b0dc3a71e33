"""Canaries of `npu_bridge/base/tf_internals/sessions.py`."""

from __future__ import annotations

import json
import os
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from npu_bridge.base.session_wrapper import EnginePlace, SessionEngine, add_engine
from npu_bridge.base.tf_internals import sessions
from tests.canaries import canary_of, expect

v1 = tf.compat.v1


class _Seen(SessionEngine):
    """Keeps what TensorFlow asks for."""

    place = EnginePlace.HOOKS

    def __init__(self):
        self.requests, self.made_of, self.kernels = [], [], 0

    def execute(self, session, request):
        self.requests.append(request._replace(options=sessions.read_content(request.options)))
        return self.inner.execute(session, request)

    def prepare_call(self, session, callable_options):
        self.made_of.append(callable_options)
        return self.inner.prepare_call(session, callable_options)

    def call_kernels(self, session, call, *arguments):
        self.kernels += 1
        return self.inner.call_kernels(session, call, *arguments)


@canary_of(sessions.run_without_engines, sessions.run_options_buffer, sessions.read_content)
def _():
    seen = _Seen()
    fed = v1.placeholder(tf.float32, [])
    doubled, target, constant = fed * 2, tf.no_op(), tf.constant(1.0)
    options = v1.RunOptions(timeout_in_ms=60000)
    asked = config_pb2.CallableOptions(fetch=[constant.name])
    with v1.Session() as session:
        add_engine(session, seen)
        values = session.run([doubled, target], {fed: 3.0}, options)
        with sessions.run_options_buffer(options) as buffer:
            expect(sessions.read_content(buffer) == options.SerializeToString(), "a buffer holds something else")
        again = sessions.run_without_engines(session, [doubled], [target], {fed: np.array(4, np.float32)})
        made = session._make_callable_from_options(asked)()
    expect(values == [6.0, None] and again == [8.0] and made == [1.0], "runs give other values")
    expect(seen.made_of == [asked], "a callable is asked for in another form")
    expect(seen.kernels == 2, "kernels are called another way")
    ((fetches, targets, feeds, given, _),) = seen.requests
    expect(targets == [target] and fetches[0] is doubled, "a run is asked for in another form")
    expect([reference.deref() for reference in feeds] == [fed], "feeds come in another form")
    expect(v1.RunOptions.FromString(given) == options, "run options come in another form")


@canary_of(sessions.is_remote, sessions.can_build_without_running, sessions.is_closed, sessions.set_finalizer_attribute)
def _():
    session = v1.Session()
    expect(not sessions.is_remote(session) and not sessions.is_closed(session), "a session is remote or closed")
    expect(sessions.can_build_without_running(session), "a session without a server runs what it is to refuse")
    session.close()
    expect(sessions.is_closed(session) and not sessions.is_closed(None), "a closed session is not known")
    unmade = v1.Session.__new__(v1.Session)
    sessions.set_finalizer_attribute(unmade)
    unmade.__del__()


@canary_of(sessions.session_interface)
def _():
    variable = v1.get_variable("variable", [])
    saver, asked = v1.train.Saver([variable]), []

    class Session(sessions.session_interface()):
        graph = v1.get_default_graph()

        def run(self, fetches, feed_dict=None, options=None, run_metadata=None):
            asked.append((fetches, list(feed_dict)))
            return next(iter(feed_dict.values()))

    with tempfile.TemporaryDirectory() as folder:
        saver.save(Session(), os.path.join(folder, "model"))
        names = saver.saver_def
        expect(asked == [(names.save_tensor_name, [names.filename_tensor_name])], "a saver runs something else")
        expect(saver.last_checkpoints == [os.path.join(folder, "model")], "a saver keeps another list")


@canary_of(sessions.plain_session)
def _():
    value = tf.constant(1.0)
    with v1.train.MonitoredSession() as session:
        plain = sessions.plain_session(session)
        expect(isinstance(plain, v1.Session) and plain.run(value) == 1.0, "there is another session inside")
        expect(sessions.plain_session(plain) is plain, "a plain session is not known")


@canary_of(sessions.default_session_config)
def _():
    before = tf.config.get_soft_device_placement()
    try:
        tf.config.set_soft_device_placement(not before)
        expect(sessions.default_session_config().allow_soft_placement is not before, "tf.config is not followed")
    finally:
        tf.config.set_soft_device_placement(before)


@canary_of(
    sessions.has_eager_context,
    sessions.function_call_settings,
    sessions.set_function_call_settings,
    sessions.copy_with_changed_config,
)
def _():
    before = sessions.function_call_settings()
    expect(sessions.has_eager_context(), "there is no eager context")
    settings = sessions.copy_with_changed_config(before, lambda config: setattr(config, "log_device_placement", True))
    sessions.set_function_call_settings(settings)
    try:
        now = v1.ConfigProto.FromString(sessions.function_call_settings().config_proto_serialized)
        expect(now.log_device_placement, "the settings did not change")
    finally:
        sessions.set_function_call_settings(before)


@canary_of(sessions.is_deterministic, sessions.set_deterministic)
def _():
    before = sessions.is_deterministic()
    for is_on in (True, False):
        sessions.set_deterministic(is_on)
        expect(sessions.is_deterministic() is is_on, "the switch does not move")
    sessions.set_deterministic(before)


@canary_of(sessions.chrome_trace)
def _():
    metadata = v1.RunMetadata()
    with v1.Session() as session:
        session.run(tf.random.uniform([2]), options=v1.RunOptions(trace_level=3), run_metadata=metadata)
    events = json.loads(sessions.chrome_trace(metadata.step_stats))["traceEvents"]
    expect(any(event.get("name") == "RandomUniform" for event in events), "the trace holds no operators")


@canary_of(sessions.summary_operators, sessions.summary_writer_initializers)
def _():
    expect(sessions.summary_operators() == [], "there are summaries from before")
    with tf.summary.create_file_writer("/nowhere").as_default(step=v1.train.get_or_create_global_step()):
        tf.summary.scalar("canary", 1.0)
    expect(len(sessions.summary_operators()) == 1, "the summary is missing")
    expect([op.type for op in sessions.summary_writer_initializers()] == ["CreateSummaryFileWriter"], "no writer")


@canary_of(sessions.empty_buffer)
def _():
    drawn = tf.random.uniform([])
    wanted = v1.RunOptions(output_partition_graphs=True)
    with v1.Session() as session, sessions.run_options_buffer(wanted) as options, sessions.empty_buffer() as metadata:
        session._do_run(None, [], [drawn], {}, options, metadata)
        graphs = v1.RunMetadata.FromString(sessions.read_content(metadata)).partition_graphs
    expect(
        any(node.op == "RandomUniform" for graph in graphs for node in graph.node),
        "a run tells no graph it was executed as",
    )


@canary_of(sessions.collected_function_graphs, eagerly=True)
def _():
    def called():
        return tf.function(lambda value: tf.exp(value) + 1.0)(tf.constant(1.0))

    called()
    with sessions.collected_function_graphs() as metadata:
        called()
    called()
    expect(len(metadata.function_graphs) == 1, f"{len(metadata.function_graphs)} functions were collected")


@canary_of(sessions.find_devices, eagerly=True)
def _():
    listed = [device.name for device in tf.config.list_physical_devices()]
    expect(sessions.find_devices() == listed, "devices are not those that TensorFlow lists")
