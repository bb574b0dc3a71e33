"""Changes sessions: passes each call of a session through engines. No other module changes sessions.

An engine repeats a training step, builds executors in another precision, or calls hooks. It is a `SessionEngine` that
`add_engine` adds to one session or to all sessions. Each call passes through the session's own engines, from
`EnginePlace.HOOKS` inwards, then through the engines of all sessions, and ends in TensorFlow's own method. This module
does not load TensorFlow.
"""

from __future__ import annotations

import enum
import functools
import types
from typing import Any, Callable, NamedTuple, TypeVar

from npu_bridge.base.after_import import call_when_loaded
from npu_bridge.base.tf_internals.names import SESSION_MODULE


class EnginePlace(enum.IntEnum):
    """The place of an engine in the layers around a session. The first place is the innermost, next to TensorFlow."""

    ALL_SESSIONS = 0
    DETERMINISM = 1
    PRECISION = 2
    LOOPS = 3  # around PRECISION, which then decides once for all steps of a run
    HOOKS = 4


class RunRequest(NamedTuple):
    """One run of a graph, in flat lists.

    Attributes:
      fetches: tensors.
      targets: operators that are run and not fetched.
      feeds: fed values, by tensor reference.
      options, metadata: RunOptions and RunMetadata as TensorFlow's buffers, or None.
    """

    fetches: list
    targets: list
    feeds: dict
    options: Any = None
    metadata: Any = None

    @property
    def requested_elements(self) -> list:
        """The operators and tensors to compute."""
        return [*self.targets, *self.fetches]

    @property
    def fed(self) -> list:
        """The fed tensors."""
        return [reference.deref() for reference in self.feeds]


class SessionEngine:
    """A layer around the calls of sessions; this base class passes each call on to the next engine.

    A subclass overrides only the methods that it needs, and calls the same methods of `self.inner`. All methods get the
    session as an argument; an engine that stored a session would keep it open.

    Attributes:
      place: the place among the engines of one session; an engine added later to the same place is outside of the
        earlier one.
      needs_all_runs: whether callables without `feed_list` call `run`, too, instead of passing by all engines.
      inner: the next engine towards TensorFlow; set by `add_engine`.
    """

    place = EnginePlace.ALL_SESSIONS
    needs_all_runs = False
    inner: SessionEngine

    def run(self, session: Any, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any) -> Any:
        """Replaces `Session.run`; returns the fetches in the caller's structure."""
        return self.inner.run(session, fetches, feed_dict, options, run_metadata)

    def execute(self, session: Any, request: RunRequest) -> list:
        """Runs a request of `Session.run` or of a callable from `make_callable`; returns the values of the fetches."""
        return self.inner.execute(session, request)

    def make_callable(self, session: Any, fetches: Any, feed_list: Any, accept_options: bool) -> Callable:
        """Replaces `Session.make_callable`. With `feed_list`, the result calls `run`; without, no engine."""
        if self.needs_all_runs and feed_list is None:
            feed_list = []
        return self.inner.make_callable(session, fetches, feed_list, accept_options)

    def prepare_call(self, session: Any, callable_options: Any) -> Callable:
        """Makes a function of the feeds from a CallableOptions. TF 1 Keras trains by such functions."""
        return self.inner.prepare_call(session, callable_options)

    def set_up_partial_run(self, session: Any, fetches: Any, feeds: Any) -> Any:
        """Replaces `Session.partial_run_setup`."""
        return self.inner.set_up_partial_run(session, fetches, feeds)

    def call_kernels(self, session: Any, call: Callable, *arguments: Any) -> Any:
        """Calls a function that builds executors or runs kernels; functions from `prepare_call` bypass this method."""
        return self.inner.call_kernels(session, call, *arguments)

    def close(self, session: Any) -> None:
        """Replaces `Session.close`."""
        self.inner.close(session)


_Engine = TypeVar("_Engine", bound=SessionEngine)


def add_engine(session: Any, engine: SessionEngine) -> None:
    """Passes all further calls of a session through an engine, a layer between the caller and TensorFlow.

    Args:
      session: an existing session; None for all sessions, also existing ones.
      engine: a new engine. If `session` is None, calls reach this engine before engines added earlier for all sessions.
    """
    _replace_session_classes()
    if session is None:
        engine.inner, _ENGINES_OF_ALL.inner = _ENGINES_OF_ALL.inner, engine
        return
    engines = sorted((*_engines_of(session), engine), key=lambda each: each.place)
    inner = _ENGINES_OF_ALL
    for each in engines:
        each.inner, inner = inner, each
    session._npu_bridge_engines = tuple(engines)


def find_engine(session: Any, kind: type[_Engine]) -> _Engine | None:
    """Returns the engine of class `kind` that was added to a session, or None."""
    return next((engine for engine in _engines_of(session) if isinstance(engine, kind)), None)


def wrap_session_constructors(wrap: Callable[[Callable], Callable]) -> list[Any]:
    """Replaces the constructors of `Session` and `InteractiveSession` by `wrap(constructor)`; returns the results."""
    import tensorflow as tf

    kinds = (tf.compat.v1.Session, tf.compat.v1.InteractiveSession)
    for kind in kinds:
        kind.__init__ = wrap(kind.__init__)
    return [kind.__init__ for kind in kinds]


def change_session_settings(change_function: Callable[[str, Any], tuple[str, Any]]) -> None:
    """Changes the target and the settings of all sessions made from now on.

    Args:
      change_function: gets a session's target and its ConfigProto or None; returns the new target and ConfigProto.
    """

    _CHANGES_OF_SETTINGS.append(change_function)
    _replace_session_classes()


def _engines_of(session: Any) -> tuple[SessionEngine, ...]:
    return getattr(session, "_npu_bridge_engines", ())


def _outermost_engine(session: Any) -> SessionEngine:
    return (_ENGINES_OF_ALL, *_engines_of(session))[-1]


class _ReplacedMethods:
    """The methods that replace those of `BaseSession`, the class of all sessions."""

    def __init__(self, target="", graph=None, config=None):
        given = target
        for change in _CHANGES_OF_SETTINGS:
            target, config = change(target, config)
        self._npu_bridge_is_served_here = target != given
        _STOCK["__init__"](self, target, graph, config)

    def run(self, fetches, feed_dict=None, options=None, run_metadata=None):
        return _outermost_engine(self).run(self, fetches, feed_dict, options, run_metadata)

    def _do_run(self, handle, target_list, fetch_list, feed_dict, options, run_metadata):
        if handle is not None:  # the next part of a partial run
            return _STOCK["_do_run"](self, handle, target_list, fetch_list, feed_dict, options, run_metadata)
        request = RunRequest(fetch_list, target_list, feed_dict, options, run_metadata)
        return _outermost_engine(self).execute(self, request)

    def make_callable(self, fetches, feed_list=None, accept_options=False):
        return _outermost_engine(self).make_callable(self, fetches, feed_list, accept_options)

    def _make_callable_from_options(self, callable_options):
        return _outermost_engine(self).prepare_call(self, callable_options)

    def partial_run_setup(self, fetches, feeds=None):
        return _outermost_engine(self).set_up_partial_run(self, fetches, feeds)

    def _call_tf_sessionrun(self, *arguments):
        return _outermost_engine(self).call_kernels(self, _STOCK["_call_tf_sessionrun"], self, *arguments)

    def _call_tf_sessionprun(self, *arguments):
        return _outermost_engine(self).call_kernels(self, _STOCK["_call_tf_sessionprun"], self, *arguments)

    def close(self):
        _outermost_engine(self).close(self)


class _StockMethods(SessionEngine):
    """The innermost engine: TensorFlow's own methods of sessions."""

    def run(self, session, fetches, feed_dict, options, run_metadata):
        return _STOCK["run"](session, fetches, feed_dict, options, run_metadata)

    def execute(self, session, request):
        fetches, targets, feeds, options, metadata = request
        return _STOCK["_do_run"](session, None, targets, fetches, feeds, options, metadata)

    def make_callable(self, session, fetches, feed_list, accept_options):
        return _STOCK["make_callable"](session, fetches, feed_list, accept_options)

    def prepare_call(self, session, callable_options):
        return _STOCK["_make_callable_from_options"](session, callable_options)

    def set_up_partial_run(self, session, fetches, feeds):
        return _STOCK["partial_run_setup"](session, fetches, feeds)

    def call_kernels(self, session, call, *arguments):
        return call(*arguments)

    def close(self, session):
        _STOCK["close"](session)


_STOCK: dict[str, Callable] = {}  # methods of `BaseSession`, unchanged
_CHANGES_OF_SETTINGS: list[Callable[[str, Any], tuple[str, Any]]] = []
_ENGINES_OF_ALL = SessionEngine()  # its `inner` are the engines of all sessions
_ENGINES_OF_ALL.inner = _StockMethods()


@functools.cache
def _replace_session_classes() -> None:
    """Changes the class of all sessions, once, as soon as TensorFlow has loaded it."""

    def change(module: types.ModuleType) -> None:
        for name, method in vars(_ReplacedMethods).items():
            if callable(method):
                _STOCK[name] = getattr(module.BaseSession, name)
                setattr(module.BaseSession, name, functools.wraps(_STOCK[name])(method))

    call_when_loaded(SESSION_MODULE, change)
