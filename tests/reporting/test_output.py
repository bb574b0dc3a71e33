"""The destination of lines without a reader."""

from __future__ import annotations

import io

import pytest

from npu_bridge.reporting.output import choose_output


class Broken(io.StringIO):
    """A stream whose reader has gone, or whose disk is full."""

    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal

    def write(self, text):
        raise BrokenPipeError(text)


class Closed(Broken):
    def write(self, text):
        raise ValueError("I/O operation on closed file.")


def test_a_scripts_object_with_write_alone_gets_whole_lines():
    class Logger:
        lines: list = []
        write = lines.append

    closed = io.StringIO()
    closed.close()
    for stream in (Logger(), closed):
        choose_output(stream).show("step 1")
    assert Logger.lines == ["step 1\n"]


@pytest.mark.parametrize("make_stream", [Broken, Closed, lambda is_terminal: None])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_line_that_cannot_be_written_ends_nothing(make_stream, is_terminal):
    output = choose_output(make_stream(is_terminal))
    output.show("step 1")
    output.note("step skipped")
    output.show("step 2")
    output.close()
