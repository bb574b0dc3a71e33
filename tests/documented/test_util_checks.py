"""The small checks of `npu_bridge.estimator.npu.util`."""

from __future__ import annotations

import pytest

from npu_bridge.estimator.npu import util


@pytest.mark.parametrize(
    "check, value, error",
    [
        (util.check_not_none, None, ValueError),
        (util.check_positive_integer, 0, ValueError),
        (util.check_positive_integer, 1.0, TypeError),
        (util.check_positive_integer, True, TypeError),
        (util.check_nonnegative_integer, -1, ValueError),
        (util.check_nonnegative_integer, "0", TypeError),
        (util.check_bool_type, 1, TypeError),
        (util.format_string, 5, TypeError),
    ],
)
def test_illegal_value_is_named(check, value, error):
    with pytest.raises(error, match="steps"):
        check(value, "steps")


@pytest.mark.parametrize(
    "check, value",
    [
        (util.check_not_none, 0),
        (util.check_positive_integer, 1),
        (util.check_nonnegative_integer, 0),
        (util.check_bool_type, False),
    ],
)
def test_legal_value_passes(check, value):
    assert check(value, "steps") is None


def test_conversions():
    assert [util.convert_bool_to_int(value) for value in (True, False, 1, None)] == [1, 0, -1, -1]
    assert (util.format_string(None, "x"), util.format_string("a", "x")) == ("", "a")


def test_profiling_options_are_joined():
    assert util.check_profiling_options(["task_time", "op_trace"]) == "task_time:op_trace"
    for illegal in ((), ["other"]):
        with pytest.raises(ValueError, match="training_trace"):
            util.check_profiling_options(illegal)


def test_path_must_be_a_usable_directory(tmp_path):
    assert util.check_path(str(tmp_path)) == str(tmp_path.resolve())
    file = tmp_path / "file"
    file.touch()
    for illegal in (str(file), str(tmp_path / "none")):
        with pytest.raises(ValueError, match="directory"):
            util.check_path(illegal)


def test_aoe_mode():
    for legal in ("1", "2", "4"):
        util.check_aoe_mode(legal)
    for illegal in ("3", "", None, 1):
        with pytest.raises(ValueError, match="aoe_mode"):
            util.check_aoe_mode(illegal)


def test_rank_size_is_text(monkeypatch):
    monkeypatch.delenv("CM_WORKER_SIZE", raising=False)
    monkeypatch.setenv("RANK_SIZE", "8")
    assert util.get_ranksize() == "8"
    monkeypatch.delenv("RANK_SIZE")
    assert util.get_ranksize() == "1"
