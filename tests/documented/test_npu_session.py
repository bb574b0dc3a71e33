"""Sessions: those without an entry are TensorFlow's own, those with one do what it says."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_helpers import npu_config_proto
from npu_bridge.estimator.npu.npu_session import decorate_sessions, decorator_tf_session
from npu_bridge.options import of_graph, with_optimizer_entry
from tests.garbage import collect_garbage
from tests.session.conftest import sessions_that_read_options  # noqa: F401 - here, too

tf1 = tf.compat.v1


class _Recording(tf1.Session):
    """Keeps what reaches TensorFlow's own constructor."""

    def __init__(self, target="", graph=None, config=None):
        self.reached = (target, graph, config)
        self._session = None

    def close(self):
        """Nothing was opened."""


@pytest.mark.parametrize("arguments", [(), ("",), ("", None, tf1.ConfigProto(log_device_placement=True))])
def test_without_an_entry_tensorflow_gets_what_was_given(arguments, monkeypatch):
    once = tf1.Session.__init__
    decorate_sessions()
    assert tf1.Session.__init__ is once is decorator_tf_session(once)  # again is as good as once
    monkeypatch.setattr(_Recording, "__init__", decorator_tf_session(_Recording.__init__))
    session = _Recording(*arguments)
    assert all(reached is argument for reached, argument in zip(session.reached, arguments))
    assert "_npu_bridge_engines" not in vars(session) and type(session) is _Recording


def _on_a_gpu():
    with tf.device("/gpu:0"):
        return tf.identity(tf1.train.get_or_create_global_step() + 1)


def _estimated(folder):
    def model_fn(features, labels, mode):
        train_op = tf1.assign_add(tf1.train.get_global_step(), _on_a_gpu())
        return tf.estimator.EstimatorSpec(mode, loss=tf.cast(_on_a_gpu(), tf.float32), train_op=train_op)

    config = tf.estimator.RunConfig(session_config=tf1.ConfigProto())
    estimator = tf.estimator.Estimator(model_fn, model_dir=str(folder), config=config)
    estimator.train(lambda: tf.data.Dataset.from_tensors(1.0), steps=1)
    return estimator.get_variable_value("global_step")


@pytest.mark.parametrize(
    "config",
    [None, tf1.ConfigProto(), with_optimizer_entry(None, {}), with_optimizer_entry(None, {"use_off_line": False})],
    ids=str,
)
def test_every_session_places_softly_after_the_import_of_npu_init(config, graph, tmp_path):
    import npu_bridge.npu_init  # noqa: F401

    decorate_sessions(places_softly=True)  # where the import came earlier in this process
    before = None if config is None else config.SerializeToString(deterministic=True)
    place = _on_a_gpu()
    start = tf1.global_variables_initializer()
    for kind in (tf1.Session, tf1.InteractiveSession, tf.compat.v1.Session):
        session = kind(config=config)
        session.run(start)
        assert session.run(place) == 1 and session._config.allow_soft_placement
        session.close()
    with tf1.train.MonitoredSession(tf1.train.ChiefSessionCreator(config=config)) as session:
        assert session.run(place) == 1
    assert config is None or config.SerializeToString(deterministic=True) == before
    if config is None:
        assert _estimated(tmp_path) == 1


def test_settings_of_a_session_stay_but_for_soft_placement():
    decorate_sessions(places_softly=True)
    config = tf1.ConfigProto(inter_op_parallelism_threads=3, log_device_placement=False)
    with tf1.Session(graph=tf.Graph(), config=config) as session:
        assert session._config.inter_op_parallelism_threads == 3 and session._config is not config
    with tf1.Session(graph=tf.Graph()) as session:
        assert session._config.device_count["CPU"] == 1  # what tf.config says
    session = tf1.InteractiveSession(graph=tf.Graph())
    assert session._config.gpu_options.allow_growth and session._config.graph_options.place_pruned_graph
    session.close()


def test_a_session_without_an_entry_is_profiled_if_the_environment_says_so(graph, monkeypatch, tmp_path):
    decorate_sessions(places_softly=True)
    weight = tf.Variable(3.0)
    train = tf1.train.GradientDescentOptimizer(0.1).minimize(weight * weight)
    monkeypatch.setenv("PROFILING_MODE", "true")
    monkeypatch.setenv("PROFILING_OPTIONS", json.dumps({"output": str(tmp_path), "training_trace": "on"}))
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        for _ in range(3):
            session.run(train)
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # TensorFlow's own, as before
def test_wrong_calls_fail_as_before():
    with pytest.raises(TypeError, match="config=config"):
        tf1.Session(tf1.ConfigProto())
    with pytest.raises(TypeError, match="tf.ConfigProto"):
        tf1.Session(config="text")
    collect_garbage()


@pytest.mark.parametrize("kind", [tf1.Session, tf1.InteractiveSession])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_illegal_option_is_an_error_at_construction(kind):
    with pytest.raises(ValueError, match="parameter_map: precision_mode .*'allow_mix_precision'"):
        kind(config=with_optimizer_entry(None, {"precision_mode": "allow_mix_precisio"}))
    collect_garbage()


def _options_of(session):
    with session.graph.as_default():
        return of_graph.options_of_current_graph()


@pytest.mark.parametrize("kind", [tf1.Session, tf1.InteractiveSession])
@pytest.mark.parametrize("by_position", [False, True])
def test_entry_is_read_and_the_proto_stays(kind, by_position):
    config = with_optimizer_entry(tf1.ConfigProto(inter_op_parallelism_threads=2), {"debug_dir": "here"})
    before = config.SerializeToString(deterministic=True)
    graph = tf.Graph()
    session = kind("", graph, config) if by_position else kind(config=config, graph=graph)
    with graph.as_default():
        three = tf.constant(3)
    assert session.run(three) == 3
    assert isinstance(session, kind) and session.graph is graph
    assert _options_of(session).debug_dir == "here"
    session.close()
    assert config.SerializeToString(deterministic=True) == before


def test_entry_places_softly_and_keeps_the_log(graph):
    config = npu_config_proto()
    config.allow_soft_placement, config.log_device_placement = False, True
    with tf.device("/device:GPU:7"):
        somewhere = tf.identity(2.0)
    with tf1.Session(config=config) as session:
        assert session.run(somewhere) == 2.0
        assert session._config.log_device_placement


def test_watched_sessions_behave_like_sessions(tmp_path, graph):
    config = with_optimizer_entry(None, {"enable_dump": True, "dump_path": str(tmp_path), "dump_step": "99"})
    x = tf1.placeholder(tf.float32, [], "x")
    double = x * 2.0
    session = tf1.Session(config=config)
    assert isinstance(session, tf1.Session) and type(session).__name__ == "Session"
    with session:
        assert session.run({"a": [double], "b": (x,)}, {x: 2.0}) == {"a": [4.0], "b": (2.0,)}
        assert double.eval({x: 3.0}) == 6.0
        metadata = tf1.RunMetadata()
        session.run(double, {x: 1.0}, options=tf1.RunOptions(output_partition_graphs=True), run_metadata=metadata)
        assert metadata.partition_graphs
        assert session.make_callable(double, [x])(4.0) == 8.0
        with pytest.raises(TypeError, match="None"):
            session.run(None)
        with pytest.raises(ValueError, match="not an element of this graph|nothing"):
            session.run("nothing:0")
    with pytest.raises(RuntimeError, match="closed"):
        session.run(double, {x: 1.0})


def test_watched_session_is_freed_without_waiting_for_the_collector(tmp_path, graph):
    config = with_optimizer_entry(None, {"enable_dump": True, "dump_path": str(tmp_path)})
    session = tf1.Session(config=config)
    session.run(tf.constant(1.0))
    watched = weakref.ref(session)
    gc.disable()
    try:
        del session
        assert watched() is None
    finally:
        gc.enable()
