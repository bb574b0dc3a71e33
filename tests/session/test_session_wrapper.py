"""Engines around sessions: their order, what goes through them, and one place that changes the class of an object."""

from __future__ import annotations

import ast
import pathlib

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

import npu_bridge
from npu_bridge.base import session_wrapper
from npu_bridge.base.session_wrapper import EnginePlace, SessionEngine, add_engine, find_engine

tf1 = tf.compat.v1


class Recorded(SessionEngine):
    """Tells what it is asked for."""

    def __init__(self, place, told):
        self.place, self.told = place, told

    def run(self, session, *arguments):
        self.told.append(("run", self.place.name))
        return self.inner.run(session, *arguments)

    def execute(self, session, request):
        self.told.append(("execute", self.place.name))
        return self.inner.execute(session, request)

    def prepare_call(self, session, callable_options):
        self.told.append(("prepare_call", self.place.name))
        return self.inner.prepare_call(session, callable_options)

    def call_kernels(self, session, call, *arguments):
        self.told.append(("call_kernels", self.place.name))
        return self.inner.call_kernels(session, call, *arguments)

    def close(self, session):
        self.told.append(("close", self.place.name))
        self.inner.close(session)


def test_engines_stand_in_their_order_whenever_they_were_added(graph):
    value, told = tf.constant(3.0), []
    session = tf1.Session()
    plain = type(session)
    for place in (EnginePlace.LOOPS, EnginePlace.DETERMINISM, EnginePlace.HOOKS, EnginePlace.PRECISION):
        add_engine(session, Recorded(place, told))
    assert isinstance(session, plain) and type(session).__name__ == plain.__name__
    assert session.run(value) == 3.0
    names = ["HOOKS", "LOOPS", "PRECISION", "DETERMINISM"]
    assert told == [(what, name) for what in ("run", "execute", "call_kernels") for name in names]
    told.clear()
    assert session.make_callable(value)() == 3.0
    assert session._make_callable_from_options(config_pb2.CallableOptions(fetch=[value.name]))() == [3.0]
    session.close()
    assert told == [(what, name) for what in ("call_kernels", "prepare_call", "close") for name in names]


def test_engines_of_all_sessions_stand_inside_those_of_one_and_around_sessions_that_exist(graph, monkeypatch):
    monkeypatch.setattr(
        session_wrapper._ENGINES_OF_ALL, "inner", session_wrapper._ENGINES_OF_ALL.inner
    )  # for this test alone
    value, told = tf.constant(3.0), []
    sessions = [tf1.Session()]
    add_engine(sessions[0], Recorded(EnginePlace.DETERMINISM, told))
    for place in (EnginePlace.LOOPS, EnginePlace.HOOKS):
        add_engine(None, Recorded(place, told))
    sessions.append(tf1.Session())
    for session, names in zip(sessions, (["DETERMINISM", "HOOKS", "LOOPS"], ["HOOKS", "LOOPS"])):
        told.clear()
        assert session.run(value) == 3.0
        assert told == [(what, name) for what in ("run", "execute", "call_kernels") for name in names]
        assert find_engine(session, Recorded) is (None if len(names) == 2 else session._npu_bridge_engines[0])


def test_an_engine_is_found_by_its_kind(graph):
    class Other(SessionEngine):
        place = EnginePlace.HOOKS

    session, engine = tf1.Session(), Recorded(EnginePlace.LOOPS, [])
    assert find_engine(session, Recorded) is None
    add_engine(session, engine)
    add_engine(session, Other())
    assert find_engine(session, Recorded) is engine


def test_one_place_changes_the_class_of_an_object():
    package = pathlib.Path(npu_bridge.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store):
                found.append(path.relative_to(package).as_posix())
    assert found == ["session/precision/keras_models.py"]
