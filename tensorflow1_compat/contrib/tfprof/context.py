"""Traces session runs: `tf.contrib.tfprof.ProfileContext`."""

from __future__ import annotations

import functools
import os

import tensorflow.compat.v1 as tf

from npu_bridge.base.session_wrapper import SessionEngine, add_engine
from npu_bridge.base.tf_internals.contrib import write_profile


class ProfileContext:
    """A context manager that traces and profiles selected session runs in its block.

    Args:
      profile_dir: folder for `profile_<step>` files.
      trace_steps: numbers of the runs to trace; by default only runs after `trace_next_step` are traced.
      dump_steps: numbers of the runs after which all traces so far are written.
      enabled: False makes the context do nothing.
    """

    def __init__(self, profile_dir, trace_steps=None, dump_steps=None, enabled=True, debug=False):
        self._folder, self._is_enabled = profile_dir, enabled
        self._trace, self._dump = set(trace_steps or ()), set(dump_steps or ())
        self._step, self._wants_next, self._dumps_next, self._profiler = 0, False, False, None
        self._auto_profiles = []

    @property
    def profiler(self):
        """A `tf.profiler.Profiler` of the default graph with all traces so far."""
        if not self._is_enabled:
            raise ValueError("ProfileContext: a context that was made with enabled=False has no profiler.")
        if self._profiler is None:
            self._profiler = tf.profiler.Profiler(tf.get_default_graph())
        return self._profiler

    def trace_next_step(self):
        """Traces the next run."""
        self._wants_next = True

    def dump_next_step(self):
        """Traces the next run, and writes all traces so far."""
        self._wants_next = self._dumps_next = True

    def add_auto_profiling(self, cmd, options, profile_steps):
        """Prints a profile after each run in `profile_steps`; `cmd` and `options` are as in `tf.profiler.profile`."""
        self._auto_profiles.append((cmd, options, set(profile_steps)))
        self._trace |= set(profile_steps)

    def __enter__(self):
        if self._is_enabled:
            _profile_engine().entered.append(self)
        return self

    def __exit__(self, *_):
        if self._is_enabled:
            _profile_engine().entered.remove(self)

    def _run_traced(self, run, session, fetches, feed_dict, options, run_metadata):
        step, self._step = self._step, self._step + 1
        if step not in self._trace | self._dump and not self._wants_next:
            return run(session, fetches, feed_dict, options, run_metadata)
        options = options or tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        run_metadata = run_metadata or tf.RunMetadata()
        values = run(session, fetches, feed_dict, options, run_metadata)
        if self._profiler is None:
            self._profiler = tf.profiler.Profiler(session.graph)
        self._profiler.add_step(step, run_metadata)
        for cmd, profile_options, steps in self._auto_profiles:
            if step in steps:
                profile = {
                    "op": self._profiler.profile_operations, "scope": self._profiler.profile_name_scope,
                    "graph": self._profiler.profile_graph, "code": self._profiler.profile_python,
                }[cmd]  # fmt: skip
                profile(profile_options)
        if step in self._dump or self._dumps_next:
            tf.gfile.MakeDirs(self._folder)
            write_profile(self._profiler, os.path.join(self._folder, f"profile_{step}"))
        self._wants_next = self._dumps_next = False
        return values


class _ProfileEngine(SessionEngine):
    """A session engine that passes session runs to the open profile contexts."""

    def __init__(self):
        self.entered = []

    def run(self, session, *run_arguments):
        run = self.inner.run
        for context in self.entered:
            run = functools.partial(context._run_traced, run)
        return run(session, *run_arguments)


@functools.cache
def _profile_engine():
    """Returns the layer around session runs that serves all profile contexts; installs it at the first call."""
    watch = _ProfileEngine()
    add_engine(None, watch)
    return watch
