"""The progress line in a real terminal, at several widths."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import tty

import pytest
import tensorflow as tf

from npu_bridge.gradients.collections import LEARNING_RATE
from npu_bridge.reporting import Progress, ProgressHook, format_progress
from tests.reporting import stepping

ALL = Progress(120, 300, 5.81234, 65536.0, 3, 12.41, "bfloat16", 1.25e-4)


@pytest.fixture
def terminal():
    """Both ends of a terminal: a descriptor to read what is shown, and a stream to write to."""
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    os.set_blocking(ours, False)
    with os.fdopen(theirs, "w") as stream:
        yield ours, stream
    os.close(ours)


def resize(stream, columns):
    fcntl.ioctl(stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def drawn(ours, count):
    """The next lines drawn; what is written to one end comes to the other when the system gets to it."""
    text = ""
    while text.count("\r") < count:
        select.select([ours], [], [])
        text += os.read(ours, 65536).decode()
    lines = [re.sub("\x1b\\[K|\n", "", line) for line in text.split("\r") if line]
    assert len(lines) == count
    return lines


def test_the_line_fits_windows_of_60_80_and_120_columns_and_keeps_the_time_left(terminal):
    ours, stream = terminal
    clock, lines, widths = stepping.Clock(per_look=0.05), {}, [120, 80, 60]
    with tf.Graph().as_default() as graph:
        graph.add_to_collection(LEARNING_RATE, 0.000125)
        train_op = stepping.build_steps([5.81] * 12, [False] * 12, [65536.0] * 12)
        hook = ProgressHook(100, every_n_steps=1, stream=stream, clock=clock)
        resize(stream, 200)
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
            for _ in range(3):  # the time left is known from here on
                session.run(train_op)
            drawn(ours, 3)
            for width in widths:  # a window that is made smaller in the middle of a training
                resize(stream, width)
                for _ in range(3):
                    session.run(train_op)
                lines[width] = drawn(ours, 3)
    for width in widths:
        for line in lines[width]:
            assert len(line) < width and re.search(r"\| ETA \d s$", line), (width, line)
    parts = ("loss 5.81", "learning rate", "loss scale", "skipped", "steps/s")
    assert {width: [part in lines[width][0] for part in parts] for width in widths} == {
        120: [True, True, True, True, True],
        80: [True, False, False, True, True],
        60: [True, False, False, False, True],
    }


def test_parts_go_whole_and_in_order():
    whole = format_progress(ALL)
    seen, before = [], whole
    for width in range(len(whole), 0, -1):
        line = format_progress(ALL, width)
        assert len(line) <= width
        if line != before:
            lost = set(before.split(" | ")) - set(line.split(" | "))
            seen.append(" ".join(sorted(lost)))
            before = line
        if width >= len("ETA 15 s"):
            assert line.endswith("ETA 15 s")
    assert seen[:7] == [
        "learning rate 0.000125",
        "loss scale 2^16",
        "bfloat16",
        "12.4 steps/s",
        "skipped 3 steps",
        "step 120/300 (40 %)",
        "loss 5.8123",
    ]
    assert format_progress(Progress(7, loss=2.0), 6) == "step 7"
