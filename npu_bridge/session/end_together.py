"""`EndTogether`: ends ranks with unequal numbers of batches together, after the last step of the rank with the fewest.

If the input of a rank ended in the middle of a step, the other ranks would already be in an all-reduce. So each rank
reads one batch ahead. Each batch carries a flag that says whether another one follows; the ranks combine the flags in
the run that trains, and stop together after the first step in which any rank has its last batch.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import message
from npu_bridge.graph.run import SessionRun, run_of_context
from npu_bridge.session.iterations import steps_per_run

_OWNER = "EndTogether"
_NEXT = "hook.next_of(dataset), called where the graph is built"


class EndTogether(tf.estimator.SessionRunHook):
    """A hook that ends the training of all ranks after the last step of the rank that has fewest batches.

    For `NPUEstimator.train`, pass it among the hooks and let the `input_fn` return a `tf.data.Dataset`. For a
    `MonitoredTrainingSession`, take the batches from `next_of`. A loop around a plain session also takes the batches
    from `next_of`, runs `tf.compat.v1.tables_initializer()`, fetches `is_last` with each step, and stops when `is_last`
    is True.
    All ranks end at the same global step, so their variables are alike, and the last checkpoint is of that step. The
    remaining batches of a longer input are not used. With one rank nothing changes. A rank that has no batch at all
    fails.

    Cost: the memory of one more batch, and an all-reduce of one number in each step.

    Attributes:
      is_last: boolean scalar tensor, set by `next_of`: whether any rank has its last batch in this run.
    Raises:
      ValueError: a training begins but `next_of` was not called, or a run trains several steps.
    Ranks: every rank needs the hook.
    """

    def __init__(self):
        self.is_last: tf.Tensor | None = None
        self._batch: tf.Operation | None = None
        self._takes_batch: weakref.WeakKeyDictionary[SessionRun, bool] = weakref.WeakKeyDictionary()

    def next_of(self, dataset: tf.data.Dataset) -> Any:
        """Returns the next element of a dataset, which is read one element ahead, in the current TF 1 graph.

        Args:
          dataset: the dataset of this rank, of any length. Its iterator is initialized with the tables of the graph,
            which Estimators and a `MonitoredTrainingSession` initialize.
        Returns:
          The result of `make_initializable_iterator(dataset).get_next()`.
        Raises:
          ValueError: `dataset` is not a `tf.data.Dataset`; an iterator or tensors cannot be read ahead.
        Graph: the operators of the dataset, and with several ranks an all-reduce of one number.
        """
        check_dataset(dataset, _OWNER)
        iterator = tf.compat.v1.data.make_initializable_iterator(with_has_next_flag(dataset))
        tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        element, has_more = iterator.get_next()
        self._batch = has_more.op
        self.is_last = tf.logical_not(collective.current().all_true(has_more, "end_together"))
        return element

    def begin(self):
        """Raises ValueError unless `next_of` was called for this graph."""
        graph = tf.compat.v1.get_default_graph()
        if self.is_last is None or self.is_last.graph is not graph:
            raise ValueError(
                message(
                    _OWNER,
                    "no batch was taken from this hook",
                    f"batches from {_NEXT}, or an NPUEstimator whose input_fn returns a data set",
                    "batches of another iterator",
                    f"Take the batches from {_NEXT}. The hook cannot look ahead in other iterators.",
                )
            )

    def before_run(self, run_context):
        """Fetches `is_last` along with a training step; raises ValueError if the run trains several steps."""
        run = run_of_context(run_context)
        if run not in self._takes_batch:
            self._takes_batch[run] = run.trains and self._batch in run.ops
            steps = steps_per_run(run_context.session, run) if self._takes_batch[run] else 1
            if steps > 1:
                problem, got = "the hook must see each single batch of a rank", f"iterations_per_loop={steps}"
                raise ValueError(message(_OWNER, problem, "single steps", got, "Leave the loop of steps out."))
        return tf.estimator.SessionRunArgs(self.is_last if self._takes_batch[run] else [])

    def after_run(self, run_context, run_values):
        """Ends the training after the last step for which all ranks have a batch."""
        if not isinstance(run_values.results, list) and bool(run_values.results):
            run_context.request_stop()


def check_dataset(dataset: Any, owner: str) -> None:
    """Raises ValueError unless `dataset` is a `tf.data.Dataset`: iterators, tensors and arrays cannot be read ahead."""
    if not isinstance(dataset, tf.data.Dataset):
        problem, expected = "the input cannot be read ahead", "a tf.data.Dataset"
        fix = "Pass the dataset itself, not an element of its iterator."
        raise ValueError(message(owner, problem, expected, type(dataset).__name__, fix))


def with_has_next_flag(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Pairs each element of a dataset with a flag: whether another element follows. Reads the dataset once."""
    pairs = tf.data.Dataset.zip((dataset, tf.data.Dataset.from_tensors(True).repeat()))

    def first_pair(elements, flags):
        follows = flags.skip(1).concatenate(tf.data.Dataset.from_tensors(False))
        return tf.data.Dataset.zip((tf.data.Dataset.zip(elements), follows)).take(1)

    return pairs.window(2, shift=1).flat_map(first_pair)
