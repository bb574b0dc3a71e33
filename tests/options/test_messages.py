"""Messages keep to their length, whatever they quote, and stay readable."""

from __future__ import annotations

import sys

import pytest

from npu_bridge.base.errors import LONGEST_MESSAGE, message, shortened, shown
from npu_bridge.base.reading import parse_json
from npu_bridge.estimator.npu import npu_config
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.options import (
    OPTIONS,
    announce_ineffective_options,
    make_session_config,
    read_run_config,
    read_session_config,
)
from npu_bridge.options.table import RUN_CONFIG, SESSION
from tests.options.conftest import slots

LONG_TEXT = "x=1|" * 5000


class _Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


def _call(owner, name, value):
    if owner == RUN_CONFIG:
        return NPURunConfig(**{name: value})
    needed = (
        {option.name: None for option in OPTIONS.options_of("DynamicInputConfig")}
        if owner == "DynamicInputConfig"
        else {}
    )
    return getattr(npu_config, owner)(**{**needed, name: value})


@pytest.mark.parametrize(
    "value",
    [LONG_TEXT, "\0" * 5000, "\ud800" * 5000, LONG_TEXT.encode(), 10**5000, [LONG_TEXT] * 9, _Unprintable(), -(2**70)],
    ids=["text", "nulls", "surrogates", "bytes", "digits", "list", "unprintable", "too low"],
)
def test_errors_of_every_option_are_short_whatever_they_quote(value, caplog):
    refusals = 0
    for option in OPTIONS:
        if option.owner != SESSION:
            try:
                _call(option.owner, option.name, value)
            except (TypeError, ValueError) as error:
                refusals += 1
                assert len(str(error)) < 500 and option.name in str(error), error
    assert refusals > 60
    assert all(len(record.getMessage()) < 500 for record in caplog.records)


def test_errors_of_sessions_are_short_too(caplog):
    refusals = 0
    for key in [*(option.key for option in OPTIONS if option.key), LONG_TEXT]:
        for slot, value in (("s", LONG_TEXT.encode()), ("s", b"\xff" * 5000), ("i", -(2**63)), ("b", True)):
            try:
                read_session_config(slots((key, slot, value)))
            except ValueError as error:
                refusals += 1
                assert len(str(error)) < 500, error
    assert refusals > 60
    assert len(caplog.records) > 60 and all(len(record.getMessage()) < 500 for record in caplog.records)


def test_wrong_calls_are_short_too():
    for arguments, keywords in (((1,) * 99, {}), ((), {LONG_TEXT: 1}), ((), {"precision_mod" * 99: 1})):
        with pytest.raises(TypeError, match="NPURunConfig") as caught:
            NPURunConfig(*arguments, **keywords)
        assert len(str(caught.value)) < 500


def test_what_is_long_loses_its_middle_and_what_is_short_nothing():
    assert shortened("abc") == "abc" and shortened("abcdefghijklmnop", 11) == "abcd ... op"
    assert message("A", "b", "c", "d", "E.") == "A: b. Expected c; got d. E."
    text = message("A", "begin" + "-" * 5000 + "end", "c" * 100, "d", "E.")
    assert text.startswith("A: begin---") and f"end. Expected {'c' * 100}; got d. E." in text
    assert max(len(message(*["x" * size] * 5)) for size in range(60, 600)) <= LONGEST_MESSAGE
    assert shown(_Unprintable()) == "a value that cannot be printed (_Unprintable)"


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("iterations_per_loop", "10", "Write 10, without quotes."),
        ("iterations_per_loop", 10.0, "Write 10."),
        ("iterations_per_loop", 10.5, "Pass an int."),
        ("enable_data_pre_proc", "false", "Write False, without quotes."),
        ("precision_mode", "mixed_fp16", "Did you mean 'allow_mix_precision_fp16'?"),
        ("precision_mode", "mixed_float16", "Write precision_mode_v2='mixed_float16'."),
        ("precision_mode_v2", "BF16", "Write 'mixed_bfloat16' here."),
        ("precision_mode_v2", "allow_mix_precision", "Write 'mixed_float16' here."),
    ],
)
def test_what_is_nearly_right_is_told_what_to_write(name, value, fix):
    with pytest.raises((TypeError, ValueError)) as caught:
        NPURunConfig(**{name: value})
    assert str(caught.value).endswith(fix)


IDLE = {"debug_dir": "here", "op_compiler_cache_dir": "there", "graph_memory_max_size": "1"}


def test_options_without_effect_are_counted_in_one_line_when_a_training_begins(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps=3"])
    options = read_run_config(NPURunConfig(iterations_per_loop=10, **IDLE))
    assert capsys.readouterr().err == "", "a configuration alone says nothing on the terminal"
    monkeypatch.setenv("RANK_ID", "1")
    announce_ineffective_options(options)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK_ID", "0")
    for _ in range(3):
        announce_ineffective_options(options)
    line = "npu_bridge: 3 of the 4 options you set have no effect here ({}): npu-run effects train.py lists them\n"
    in_table = sorted(IDLE, key=[option.name for option in OPTIONS].index)
    assert capsys.readouterr().err == line.format(", ".join(in_table))
    announce_ineffective_options(read_run_config(NPURunConfig(iterations_per_loop=10)))
    announce_ineffective_options(read_session_config(make_session_config(NPURunConfig())))
    assert capsys.readouterr().err == ""
    announce_ineffective_options(read_session_config(make_session_config(NPURunConfig(debug_dir="here"))))
    assert "the option you set has no effect here (debug_dir)" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1e999", "-1e999", "36893488147419103232", "[" * 100000])
def test_numbers_of_json_files_have_at_most_64_bits(text):
    with pytest.raises(ValueError, match="64 bit|64-bit|too deeply"):
        parse_json(text)
