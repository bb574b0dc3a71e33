"""Runs experiments: `tf.contrib.learn.learn_runner`."""

from __future__ import annotations


def run(experiment_fn, output_dir=None, schedule=None, run_config=None, hparams=None):
    """Makes an experiment and runs one of its methods.

    Args:
      experiment_fn: function that makes the experiment; called with `output_dir`, or with `run_config` and `hparams` if
        `run_config` is given.
      output_dir: folder of the model; required without `run_config`.
      schedule: name of the method to run; default: `train_and_evaluate`.
    """
    if run_config is not None:
        experiment = experiment_fn(run_config, hparams)
    else:
        experiment = experiment_fn(output_dir)
    return getattr(experiment, schedule or "train_and_evaluate")()


def tune(experiment_fn, tuner):
    """Trains with each setting that a tuner offers."""
    while tuner.next_trial():
        tuner.run_experiment(experiment_fn)
