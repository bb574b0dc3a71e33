"""Lines of several ranks on one stream; the clock is an argument."""

from __future__ import annotations

import io
import os

import pytest

from npu_run.job.output import JointStream, RankLog, RankOutput


@pytest.fixture
def stream():
    return io.BytesIO()


@pytest.fixture
def ranks(stream):
    joint = JointStream(stream)
    return [RankOutput(rank, joint) for rank in range(2)]


def test_lines_keep_their_rank_and_stay_whole(stream, ranks):
    ranks[0].receive_output(b"a", 0.0)
    ranks[1].receive_output(b"b\nc", 0.0)
    ranks[0].receive_output(b"a\n", 0.0)
    ranks[1].receive_output(b"c\n", 0.0)
    assert stream.getvalue() == b"[rank 1] b\naa\n[rank 1] cc\n"


def test_unfinished_line_of_rank_0_is_shown_after_a_moment(stream, ranks):
    ranks[0].receive_output(b"password? ", 5.0)
    ranks[0].write_unfinished_line(5.2)
    assert stream.getvalue() == b""
    ranks[0].write_unfinished_line(5.3)
    assert stream.getvalue() == b"password? "


def test_later_pieces_do_not_delay_an_unfinished_line(stream, ranks):
    for when, piece in ((5.0, b"ready"), (5.2, b" and")):
        ranks[0].receive_output(piece, when)
    ranks[0].write_unfinished_line(5.3)
    assert stream.getvalue() == b"ready and"


def test_text_that_is_not_read_while_a_job_ends_is_left_out_and_counted():
    reading, writing = os.pipe()
    with open(reading, "rb", 0) as reader, open(writing, "wb", 0) as pipe:
        joint = JointStream(pipe, is_stopping=lambda: True)
        joint.write(b"x" * 3 * 2**20)
        joint.write(b"y" * 100)
        seen = reader.read(2**21)
        joint.write_line(b"ended")
        rest = reader.read(2**21).decode()
    gap = f"--- {3 * 2**20 + 100 - len(seen)} bytes are not here: they were not read"
    assert set(seen) == set(b"x") and rest.splitlines()[-2:] == [gap, "ended"]


def test_progress_bar_of_rank_0_is_passed_on_as_it_is_drawn(stream, ranks):
    ranks[0].receive_output(b"\r 10%\r 20%\r", 0.0)
    assert stream.getvalue() == b"\r 10%\r 20%\r"
    ranks[1].receive_output(b"late\n", 0.0)
    assert stream.getvalue().endswith(b"20%\r\n[rank 1] late\n")


def test_progress_bar_of_another_rank_becomes_one_line(stream, ranks):
    ranks[1].receive_output(b"\r 10%\r 20%", 0.0)
    ranks[1].write_unfinished_line(9.0)
    assert stream.getvalue() == b""
    ranks[1].receive_output(b"\r100%\n", 10.0)
    assert stream.getvalue() == b"[rank 1] 100%\n"


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_progress_bar_that_returns_after_every_state_is_one_line_of_the_log(tmp_path, stream, ranks, end):
    log = RankLog(tmp_path, 1, "title")
    for state in (b" 10%\r", b" 20%\r", b"100%", end):
        log.receive_output("stdout", state)
        ranks[1].receive_output(state, 0.0)
    log.close()
    ranks[1].close()
    assert (tmp_path / "rank_1.log").read_bytes().splitlines()[1:] == [b"100%"]
    assert stream.getvalue() == b"[rank 1] 100%\n"


def test_a_line_of_many_pieces_passes_whole_and_is_short_in_the_tail(tmp_path, stream, ranks):
    pieces = [b"%d," % number * 2**10 for number in range(20)]
    log = RankLog(tmp_path, 1, "title")
    for piece in pieces:
        log.receive_output("stdout", piece)
        ranks[1].receive_output(piece, 0.0)
    log.close()
    ranks[1].close()
    assert (tmp_path / "rank_1.log").read_bytes().splitlines()[1:] == [b"".join(pieces)]
    assert stream.getvalue() == b"[rank 1] " + b"".join(pieces) + b"\n"
    assert ranks[1].tail[-1].endswith("19,19,")
    assert len(ranks[1].tail[-1]) < 2**13


def test_tail_keeps_the_last_lines(ranks):
    ranks[1].receive_output(b"".join(b"%d\n" % line for line in range(100)), 0.0)
    assert list(ranks[1].tail) == [str(line) for line in range(60, 100)]


@pytest.mark.parametrize(
    "start",
    [
        b"2026-11-25 10:20:30.123456: W tensorflow/core/framework/op_kernel.cc:1839] OP_REQUIRES failed: ",
        b"W0000 00:00:1795652460.298987   28541 local_rendezvous.cc:412] Local rendezvous is aborting: ",
        b"W1125 10:20:30.298987   28541 op_kernel.cc:1858] OP_REQUIRES failed at mpi_ops.cc:651: ",
    ],
)
def test_what_a_rank_logs_because_another_one_failed_is_left_out(stream, ranks, start):
    operator = b"\t [[{{node transfers/fragment_0}}]]\n"
    ranks[0].receive_output(
        start + b"Horovod has been shut down. This was caused by\n" + operator + b"mine\n" + operator, 0.0
    )
    ranks[0].receive_output(start + b"resource exhausted\n" + operator, 0.0)
    assert stream.getvalue() == b"mine\n" + operator + start + b"resource exhausted\n" + operator


def test_the_end_of_a_step_of_tensorflows_servers_is_no_message(stream, ranks):
    cleanup = b"status: ABORTED: Cleanup 33069547522579597 [type.googleapis.com/tensorflow.DerivedStatus='']\n"
    ranks[0].receive_output(
        b"W0000 00:00:1795865565.426615   16287 local_rendezvous.cc:412] Local rendezvous is aborting with ", 0.0
    )
    ranks[0].receive_output(cleanup + b"mine\n", 0.0)
    assert stream.getvalue() == b"mine\n"
