"""`tf.contrib.testing`: reads event files."""

from __future__ import annotations

import glob
import os

import tensorflow.compat.v1 as tf


def latest_events(base_dir):
    """Returns the events in the newest event file of a folder."""
    files = sorted(glob.glob(os.path.join(base_dir, "events.*")), key=os.path.getmtime)
    return list(tf.train.summary_iterator(files[-1]))


def latest_summaries(base_dir):
    """Returns the events with a summary in the newest event file of a folder."""
    return [event for event in latest_events(base_dir) if event.HasField("summary")]
