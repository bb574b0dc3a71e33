"""The one class that wraps live sessions, and asks engines what to do before, around and after each run.

An engine changes what sessions do: repeats a training step, builds executors in another precision, calls hooks. It is a
`SessionEngine` that is added to a session with `add_engine`; whatever the session is asked for then goes through all of
its engines, from `Place.HOOKS` inwards, and ends in TensorFlow's own session.
"""

from __future__ import annotations

import enum
from typing import Any, Callable, NamedTuple, TypeVar

from npu_bridge.base.classes import change_class


class Place(enum.IntEnum):
    """Where an engine stands; the innermost one, next to TensorFlow, comes first."""

    DETERMINISM = 0
    PRECISION = 1
    LOOPS = 2  # around the precision, which then decides once for all steps of a run
    HOOKS = 3


class Request(NamedTuple):
    """One run of a graph, without Python structure around it.

    Attributes:
      fetches: tensors.
      targets: operators that are run and not fetched.
      feeds: values by tensor reference.
      options, metadata: RunOptions and RunMetadata as TensorFlow's buffers, or None.
    """

    fetches: list
    targets: list
    feeds: dict
    options: Any = None
    metadata: Any = None


class SessionEngine:
    """What stands around the work of one session; here everything is passed on to the next one.

    A subclass overrides the methods it has something to do for, and calls those of `self.inner` as it needs. All get
    the session; an engine that kept it would keep it open.

    Attributes:
      place: where it stands; of two in one place the later one is the outer one.
      inner: the next engine towards TensorFlow; set by `add_engine`.
    """

    place: Place
    inner: SessionEngine

    def run(self, session: Any, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any) -> Any:
        """`Session.run`; what is fetched has the structure the caller gave."""
        return self.inner.run(session, fetches, feed_dict, options, run_metadata)

    def execute(self, session: Any, request: Request) -> list:
        """What `run` and calls of `make_callable` come down to. Returns the values of the fetches."""
        return self.inner.execute(session, request)

    def make_callable(self, session: Any, fetches: Any, feed_list: Any, accept_options: bool) -> Callable:
        """`Session.make_callable`. A function without a list of feeds goes past `execute` when it is called."""
        return self.inner.make_callable(session, fetches, feed_list, accept_options)

    def prepare_call(self, session: Any, callable_options: Any) -> Callable:
        """Makes a function of a CallableOptions; its arguments are the feeds. TF 1 Keras trains by such functions."""
        return self.inner.prepare_call(session, callable_options)

    def set_up_partial_run(self, session: Any, fetches: Any, feeds: Any) -> Any:
        """`Session.partial_run_setup`."""
        return self.inner.set_up_partial_run(session, fetches, feeds)

    def call_kernels(self, session: Any, call: Callable, *arguments: Any) -> Any:
        """Calls a function that builds executors or runs kernels; functions of `prepare_call` go past it."""
        return self.inner.call_kernels(session, call, *arguments)

    def close(self, session: Any) -> None:
        """`Session.close`."""
        self.inner.close(session)


_Engine = TypeVar("_Engine", bound=SessionEngine)


def add_engine(session: Any, engine: SessionEngine) -> None:
    """Lets an engine stand around everything a session does from now on.

    The class of the session becomes a subclass of what it was; the engine was added nowhere yet.
    """
    if not isinstance(session, _WrappedSession):
        session._npu_bridge_engines = ()
        session._npu_bridge_outermost = _TensorFlow()
        change_class(session, type(type(session).__name__, (_WrappedSession, type(session)), {}))
    engines = sorted((*session._npu_bridge_engines, engine), key=lambda each: each.place)
    inner: SessionEngine = _TensorFlow()
    for each in engines:
        each.inner, inner = inner, each
    session._npu_bridge_engines, session._npu_bridge_outermost = tuple(engines), inner


def find_engine(session: Any, kind: type[_Engine]) -> _Engine | None:
    """The engine of a kind that was added to a session; None without one."""
    engines = session._npu_bridge_engines if isinstance(session, _WrappedSession) else ()
    return next((engine for engine in engines if isinstance(engine, kind)), None)


class _WrappedSession:
    """Mixed into the class of a session."""

    _npu_bridge_engines: tuple[SessionEngine, ...]
    _npu_bridge_outermost: SessionEngine

    def run(self, fetches, feed_dict=None, options=None, run_metadata=None):
        return self._npu_bridge_outermost.run(self, fetches, feed_dict, options, run_metadata)

    def _do_run(self, handle, target_list, fetch_list, feed_dict, options, run_metadata):
        if handle is not None:  # the next part of a partial run
            return super()._do_run(handle, target_list, fetch_list, feed_dict, options, run_metadata)
        request = Request(fetch_list, target_list, feed_dict, options, run_metadata)
        return self._npu_bridge_outermost.execute(self, request)

    def make_callable(self, fetches, feed_list=None, accept_options=False):
        return self._npu_bridge_outermost.make_callable(self, fetches, feed_list, accept_options)

    def _make_callable_from_options(self, callable_options):
        return self._npu_bridge_outermost.prepare_call(self, callable_options)

    def partial_run_setup(self, fetches, feeds=None):
        return self._npu_bridge_outermost.set_up_partial_run(self, fetches, feeds)

    def _call_tf_sessionrun(self, *arguments):
        return self._npu_bridge_outermost.call_kernels(self, super()._call_tf_sessionrun, *arguments)

    def _call_tf_sessionprun(self, *arguments):
        return self._npu_bridge_outermost.call_kernels(self, super()._call_tf_sessionprun, *arguments)

    def close(self):
        self._npu_bridge_outermost.close(self)


class _TensorFlow(SessionEngine):
    """The innermost one: what the session did before it was wrapped."""

    def run(self, session, fetches, feed_dict, options, run_metadata):
        return super(_WrappedSession, session).run(fetches, feed_dict, options, run_metadata)

    def execute(self, session, request):
        fetches, targets, feeds, options, metadata = request
        return super(_WrappedSession, session)._do_run(None, targets, fetches, feeds, options, metadata)

    def make_callable(self, session, fetches, feed_list, accept_options):
        return super(_WrappedSession, session).make_callable(fetches, feed_list, accept_options)

    def prepare_call(self, session, callable_options):
        return super(_WrappedSession, session)._make_callable_from_options(callable_options)

    def set_up_partial_run(self, session, fetches, feeds):
        return super(_WrappedSession, session).partial_run_setup(fetches, feeds)

    def call_kernels(self, session, call, *arguments):
        return call(*arguments)

    def close(self, session):
        super(_WrappedSession, session).close()
