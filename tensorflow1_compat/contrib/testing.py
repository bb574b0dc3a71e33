"""`tf.contrib.testing`: reads event files."""

from __future__ import annotations

import glob
import os

import tensorflow.compat.v1 as tf


def latest_events(base_dir):
    """Returns the events of a folder's newest event file."""
    files = sorted(glob.glob(os.path.join(base_dir, "events.*")), key=os.path.getmtime)
    return list(tf.train.summary_iterator(files[-1]))


def latest_summaries(base_dir):
    """Returns the `latest_events` that have a summary."""
    return [event for event in latest_events(base_dir) if event.HasField("summary")]
