"""Trains a script under TensorFlow 1.15 from what `npu-run record` wrote: `python replay.py RECORDED OUT SCRIPT ...`.

The script is unchanged, and finds `npu_bridge` in `names.py`. `OUT` gets `replayed.json`, with losses and the names of
operators that have drawn numbers which were not recorded, `weights_after.npz`, and `tensors_00000.npz` and so on where
the record has them.
"""

import json
import os
import random
import runpy
import sys

import numpy as np

RECORDED, OUT, SCRIPT = (os.path.abspath(path) for path in sys.argv[1:4])
HERE = os.path.dirname(os.path.abspath(__file__))
_RANK = os.path.join(RECORDED, "rank_0")
_SEED = 20150


class Oracle:
    """Stands around all session runs of this process; ends it after the last recorded step."""

    def __init__(self):
        from replay_tf1 import Replay

        self._replay = Replay(RECORDED)
        with open(os.path.join(_RANK, "record.json")) as file:
            self._facts = json.load(file)
        self._losses, self._scalars, self._drawn, self._session = [], [], set(), None
        self._is_inside = False

    def run(self, run, session, fetches, feed_dict=None, options=None, run_metadata=None):
        """A session's run."""
        replay, graph = self._replay, session.graph
        is_other = self._session not in (None, session)
        if self._is_inside or is_other or not replay.is_step(graph, fetches):
            return run(session, fetches, feed_dict, options, run_metadata)
        self._is_inside = True
        try:
            if self._session is None:
                self._session = session
                replay.load_weights(session)
            step = len(self._losses)
            feeds = {**(feed_dict or {}), **replay.feeds(graph, step)}
            self._note_drawn(graph, fetches, feeds)
            more = {name: name for name in self._tensors(step) if has_tensor(graph, name)}
            wanted = (fetches, more, self._loss(graph, fetches, step))
            asked, seen, loss = run(session, wanted, feeds, options, run_metadata)
            self._losses.append(float(loss[0]) if loss else None)
            if self._tensors(step):
                np.savez(os.path.join(OUT, f"tensors_{step:05d}.npz"), **seen)
            if step + 1 == replay.steps:
                self._end(session)
            return asked
        finally:
            self._is_inside = False

    def make_callable(self, make, session, options):
        """Returns the function through which Keras trains."""
        call, asked = make(session, options), [*options.fetch, *options.target]

        def run_or_call(*values, run_metadata=None):
            elements = [session.graph.as_graph_element(name) for name in asked]
            if options.tensor_connection or not self._replay.is_step(session.graph, elements):
                return call(*values, run_metadata=run_metadata)
            return session.run(elements, dict(zip(options.feed, values)))[: len(options.fetch)]

        return run_or_call

    def note(self, ys, gradients):
        """Returns the losses of which gradients were taken."""
        if not isinstance(ys, (list, tuple)) and ys.shape.ndims == 0:
            self._scalars.append((ys, {getattr(each, "op", None) for each in gradients}))

    def _loss(self, graph, fetches, step):
        """The loss by its name, or, as Keras has other names, the last scalar whose gradients are at work."""
        name = self._facts["loss_names"][step]
        if name and has_tensor(graph, name):
            return [name]
        needed = self._replay.list_needed_operators(graph, fetches)
        return [scalar for scalar, gradients in self._scalars if gradients & needed][-1:]

    def _tensors(self, step):
        path = os.path.join(_RANK, f"tensors_{step:05d}.npz")
        return np.load(path).files if os.path.exists(path) else []

    def _note_drawn(self, graph, fetches, feeds):
        fed = {graph.as_graph_element(key).op for key in feeds if isinstance(key, str)}
        for op in self._replay.list_needed_operators(graph, fetches):
            attributes = {each.name for each in op.op_def.attr} if op.op_def else set()
            if {"seed", "seed2"} <= attributes and op not in fed and "Dataset" not in op.type:
                self._drawn.add(op.name)

    def _end(self, session):
        import tensorflow as tf
        from replay_tf1 import name_in_record

        with session.graph.as_default():
            saved = [each for each in tf.global_variables() if each.dtype.base_dtype != tf.string]
            variables = {name_in_record(each): each for each in saved}
        np.savez(os.path.join(OUT, "weights_after.npz"), **session.run(variables))
        with open(os.path.join(OUT, "replayed.json"), "w") as file:
            json.dump({"losses": self._losses, "drawn": sorted(self._drawn)}, file)
        sys.stdout.flush()
        os._exit(0)  # whatever the script would do next, its threads included


def has_tensor(graph, name):
    """Whether a graph has a tensor that can be fetched."""
    try:
        return graph.is_fetchable(graph.get_tensor_by_name(name))
    except (KeyError, ValueError):
        return False


def main():
    """Runs the script."""
    os.makedirs(OUT, exist_ok=True)
    sys.path[0] = os.path.dirname(SCRIPT)
    sys.path[1:1] = [RECORDED]
    random.seed(_SEED)
    np.random.seed(_SEED)
    from tensorflow.python.client.session import BaseSession
    from tensorflow.python.ops import gradients_util

    sys.path.append(HERE)
    import names

    sys.path.remove(HERE)
    del sys.modules["names"]
    names.install()
    oracle, run, make = Oracle(), BaseSession.run, BaseSession._make_callable_from_options
    take = gradients_util._GradientsHelper

    def noted(ys, *given, **named):
        gradients = take(ys, *given, **named)
        oracle.note(ys, gradients)
        return gradients

    gradients_util._GradientsHelper = noted
    BaseSession.run = lambda self, *given, **named: oracle.run(run, self, *given, **named)
    BaseSession._make_callable_from_options = lambda self, options: oracle.make_callable(make, self, options)
    sys.argv = sys.argv[3:]
    runpy.run_path(SCRIPT, run_name="__main__")


if __name__ == "__main__":
    main()
