"""`GlobalBatches`: gives every update the same rows with any number of ranks, and uses each row once an epoch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message
from npu_bridge.collective.fragments import lossless_prescale
from npu_bridge.collective.small_values import gather_values
from npu_bridge.gradients.checkpoints.sync import pipelines_of
from npu_bridge.gradients.graph_mode import state_variable
from npu_bridge.gradients.stage import RestartingStage, Stage
from npu_bridge.gradients.stages.accumulation import Accumulate
from npu_bridge.graph.variables import global_step_of
from npu_bridge.session.damaged_checkpoints import check_newest_checkpoint
from npu_bridge.session.elastic.memory_checkpoints import take_memory_checkpoint

_OWNER = "GlobalBatches"
_GLOBAL_STEP = tf.compat.v1.GraphKeys.GLOBAL_STEP
_STEPS_OF_KERAS = re.compile(r"(^|/)(iter|_iterations)/\.ATTRIBUTES/VARIABLE_VALUE$")  # of both generations
UPDATES_DEALT = "updates_dealt"  # the variable's name, also in checkpoints


class GlobalBatches:
    """Distributes the rows of a data set over ranks so that a training is the same with any number of ranks.

    Rows have one endless order, epoch after epoch. Each epoch is a permutation of all rows that depends only on `seed`
    and the number of the epoch. Update number n uses the `batch` rows from position n * `batch` on. They are split into
    micro-batches of `micro` rows, which the ranks share. With 8 micro-batches and 4 ranks, each rank adds up two; with
    3 ranks, two ranks add up three and one rank two; with 16 ranks, half of the ranks have nothing to do. The mean over
    all rows is the same for any number of ranks, except for rounding. A training that resumes at update n with more or
    fewer ranks continues with the rows of update n: no row is left out or used twice.

    Give the optimizer the stages of `stages()`, and train on batches of `dataset` or `indices`. Every rank makes the
    same number of runs for an update (`batches_per_update`). A rank with a smaller share repeats rows; the repeated
    rows do not count.

    Args:
      rows: the number of rows of the data set.
      batch: rows of one update, over all ranks.
      micro: rows that a rank computes at once; a divisor of `batch`. By default `batch`.
      seed: seed of the permutations; None leaves the rows in their order.
    Raises:
      TypeError: a number is not an integer.
      ValueError: a number is below 1, or `micro` does not divide `batch`.
    Ranks: local; make it with the same arguments on every rank.
    Example:
      >>> batches = GlobalBatches(rows=len(x), batch=64, micro=8, seed=1)
      >>> optimizer = NPUOptimizer(tf.train.AdamOptimizer(), stages=batches.stages(), is_distributed=True)
      >>> estimator.train(lambda: batches.dataset((x, y), "out"), max_steps=1000)
    """

    def __init__(self, rows: int, batch: int, micro: int | None = None, seed: int | None = 0):
        self.rows = check_count(_OWNER, "rows", rows, "Pass the number of rows of the data.")
        self.batch = check_count(_OWNER, "batch", batch, "Pass the number of rows of one update.")
        self.micro = check_count(
            _OWNER, "micro", batch if micro is None else micro, "Leave it out for one micro-batch."
        )
        if self.batch % self.micro:
            problem, expected = "micro-batches do not fill a batch", f"a divisor of batch={self.batch}"
            raise ValueError(message(_OWNER, problem, expected, f"micro={self.micro}", "Use a divisor."))
        if seed is not None:
            seed = check_count(_OWNER, "seed", seed, "Use None to leave the rows in their order.", at_least=0)
        self.seed = seed

    @property
    def batches_per_update(self) -> int:
        """Number of batches that each rank computes for one update, with the present number of ranks."""
        return -(-(self.batch // self.micro) // collective.current().size)

    def stages(self) -> list:
        """Returns new stages for an optimizer: they make one update from every `batch` rows, and count the updates.

        The optimizer can train one list of variables: a second list is a ValueError.
        """
        share = _RankShare(self.batch // self.micro, collective.current().size, collective.current().rank)
        return [*([] if share.is_whole else [_AccumulateShares(share)]), _CountUpdates()]

    def indices(self, after: Any = None) -> tf.data.Dataset:
        """Returns an endless dataset of row numbers for this rank: int64 tensors of shape [micro].

        Args:
          after: the training to continue: the folder of its checkpoints, or a Keras model after
            `ResumeCallback.restore`. The dataset begins with the next update of this training; with None, with the
            first update. With a model, each `fit` continues after the last one. With a folder, make one iterator.
        Ranks: collective, unless `after` is None.
        """
        start, ranks = 0 if after is None else updates_dealt(after), collective.current()
        spec = tf.TensorSpec([self.micro], tf.int64)
        optimizer = getattr(after, "optimizer", None)

        def row_numbers():  # for each `fit` anew
            first = start if optimizer is None else max(start, _updates_made(optimizer))
            return self.row_numbers_of_rank(first, ranks.rank, ranks.size)

        return tf.data.Dataset.from_generator(row_numbers, output_signature=spec)

    def dataset(self, arrays: Any, after: Any = None) -> tf.data.Dataset:
        """Returns an endless dataset of batches for this rank.

        Args:
          arrays: an array with `rows` rows, or a structure of such arrays. The graph holds them as constants: for more
            than a gigabyte use `indices`, and look up the rows yourself.
          after: the training to continue, as in `indices`.
        Returns:
          A data set of the same structure, with `micro` rows of each array.
        Raises:
          ValueError: an array does not have `rows` rows.
        Ranks: collective, unless `after` is None.
        """
        for array in tf.nest.flatten(arrays):
            if len(array) != self.rows:
                expected, got = f"rows={self.rows} in each array", str(len(array))
                raise ValueError(message(_OWNER, "an array has another number of rows", expected, got, "Correct rows."))
        return self.indices(after).map(lambda numbers: tf.nest.map_structure(lambda a: tf.gather(a, numbers), arrays))

    def row_numbers_of_rank(self, start: int, rank: int, size: int) -> Iterator[np.ndarray]:
        """Yields the row numbers of each micro-batch of a rank, without end.

        Args:
          start: number of the first update.
          rank, size: the rank, and the number of ranks.
        """
        count = self.batch // self.micro
        epoch, order = -1, np.arange(self.rows)
        update = start
        while True:
            for own in range(-(-count // size)):
                # A rank whose share is used up repeats the last micro-batch of the update.
                number = min(own * size + rank, count - 1)
                places = np.arange(self.micro) + (update * self.batch + number * self.micro)
                numbers = np.empty(self.micro, np.int64)
                for each in np.unique(places // self.rows):
                    if each != epoch:
                        epoch, order = each, self._permutation_of_epoch(each)
                    mask = places // self.rows == each
                    numbers[mask] = order[places[mask] % self.rows]
                yield numbers
            update += 1

    def _permutation_of_epoch(self, epoch: int) -> np.ndarray:
        if self.seed is None:
            return np.arange(self.rows)
        return np.random.Generator(np.random.PCG64([self.seed, int(epoch)])).permutation(self.rows)


def updates_dealt(after: str | os.PathLike | tf.keras.Model) -> int:
    """Returns the number of updates for which a training has consumed rows; all ranks get rank 0's count.

    Args:
      after: the folder of the training's checkpoints, of which the latest is read, or a compiled Keras model. If the
        optimizer has no stages of `GlobalBatches`, or had none when it was saved, the number of its steps is returned.
    Raises:
      DamagedCheckpointError: the latest checkpoint is damaged. In a job that the launcher restarts, raised only if no
        other checkpoint is intact.
    Ranks: collective.
    """
    ranks, dealt = collective.current(), 0
    if not isinstance(after, (str, os.PathLike)):
        return count_earlier_steps(after.optimizer)
    take_memory_checkpoint(os.fspath(after))
    if ranks.rank == 0:
        check_newest_checkpoint(os.fspath(after), may_use_older=True)
    checkpoint = tf.train.latest_checkpoint(os.fspath(after)) if ranks.rank == 0 else None
    if checkpoint is not None:
        reader = tf.train.load_checkpoint(checkpoint)
        names = reader.get_variable_to_shape_map()
        counts = [name for name in names if UPDATES_DEALT in name or "dealt/updates/" in name]
        found = counts or [name for name in names if name == _GLOBAL_STEP or _STEPS_OF_KERAS.search(name)]
        dealt = max((int(reader.get_tensor(name)) for name in found), default=0)
    return gather_values(dealt, "updates_dealt")[0]


def count_earlier_steps(optimizer: Any) -> int:
    """Returns rank 0's number of updates of any Keras optimizer, and sets the count of its stages to this number.

    Ranks: collective.
    """
    dealt = gather_values(_updates_made(optimizer), "updates_dealt")[0]
    for count in _counts_of(optimizer):
        count.assign(dealt)
    return dealt


def _counts_of(optimizer):
    stages = [stage for pipeline in pipelines_of(optimizer) for stage in pipeline.stages_of_type(_CountUpdates)]
    return [stage.state()["dealt"].updates for stage in stages]


def _updates_made(optimizer):
    # Each step was an update. More steps than updates: a training without a count was restored.
    return max(map(int, [optimizer.iterations, *_counts_of(optimizer)]))


def _initial_update_count() -> tf.Tensor:
    """Returns the initial count of updates: the global step if a checkpoint without this count was restored, else 0."""
    step = None if tf.executing_eagerly() else global_step_of()
    if not isinstance(step, tf.Variable):
        return tf.zeros([], tf.int64)
    is_known = tf.compat.v1.is_variable_initialized(step)  # False in a new training
    return tf.cond(is_known, lambda: tf.cast(step, tf.int64), lambda: tf.zeros([], tf.int64))


class _RankShare:
    """The micro-batches of an update that one rank computes.

    Attributes:
      runs: number of batches that every rank computes for an update.
      own: number of these batches that count on this rank.
      weight: weight of a batch that counts, in the mean over runs and ranks.
      is_whole: whether one batch on each rank makes up an update.
    """

    def __init__(self, count: int, size: int, rank: int):
        self.runs = -(-count // size)
        self.own = len(range(rank, count, size))
        self.weight = self.runs * size / count
        self.is_whole = self.runs == 1 and self.weight == 1.0


class _AccumulateShares(Accumulate, RestartingStage):
    """A stage that adds up the gradients of this rank's share of a batch; surplus batches have weight 0.

    If a checkpoint was saved in the middle of an update, a resumed training computes the whole update again.
    """

    def __init__(self, share: _RankShare):
        super().__init__(share.runs)
        self._share = share
        self.keeps_usable = share.weight == 1.0

    def __copy__(self):
        return type(self)(self._share)

    def weighted_batch_term(self, values, earlier_batches):
        mean, share = super().weighted_batch_term(values, earlier_batches), self._share
        if share.weight == 1.0:
            return mean
        return tf.where(earlier_batches < share.own, mean * tf.cast(share.weight, mean.dtype), tf.zeros_like(mean))

    def before_reduce(self, step):
        if step.divisor is not None and self._share.weight > 1.0:
            # Scaling must keep a share of finite gradients finite, else more ranks would skip more steps.
            step.record_factor(lossless_prescale(self._share.weight))
        super().before_reduce(step)


class _CountUpdates(Stage):
    """A stage that counts updates, including skipped ones; the count is saved with the model.

    Raises ValueError for a second list of variables: their updates can use the rows of the same batch, or of another.
    """

    def __init__(self):
        self._module: tf.Module | None = None
        self._trained: set = set()

    def __copy__(self):
        return type(self)()

    def state(self):
        if self._module is None:
            self._module = tf.Module(name="dealt")
            self._module.updates = state_variable(_initial_update_count, UPDATES_DEALT)
        return {"dealt": self._module}

    def create_variables(self, variables, gradients=None):
        self.state()
        if gradients is None or not variables:
            return
        trained = {variable.ref() for variable in variables}
        if self._trained and not self._trained & trained:
            problem, expected = "an update of each list of variables would count as a batch", "one list of variables"
            got = f"one optimizer for several lists; the last begins with {variables[0].name}"
            fix = "Make an optimizer with stages=batches.stages() for each list, and train all lists on one batch."
            raise ValueError(message(_OWNER, problem, expected, got, fix))
        self._trained |= trained

    def after_update(self, step):
        one = 1 if step.is_due is None else tf.cast(step.is_due, tf.int64)
        return self.state()["dealt"].updates.assign_add(one)
