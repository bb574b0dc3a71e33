"""The checker of arguments: what each function takes, what it gives, and the sentence about what it refuses."""

from __future__ import annotations

import fractions

import numpy as np
import pytest

from npu_bridge.base import arguments, errors

INF, NAN = float("inf"), float("nan")


class Thing:
    def __repr__(self):
        return "a thing"


@pytest.mark.parametrize(
    ("check", "text", "others"),
    [(arguments.check_number, "1E-3", ["1.2.3", "...", "nan"]), (arguments.check_count, "4", ["0.1"])],
)
def test_a_number_in_quotes_is_told_to_lose_them(check, text, others):
    with pytest.raises(TypeError, match=rf"got '{text}' \(str\). Write {text}, without quotes."):
        check("Owner", "x", text, "Use 1.")
    for other in (*others, "ten", "9" * 60, "1; 2", None):
        with pytest.raises(TypeError, match="Use 1"):
            check("Owner", "x", other, "Use 1.")


@pytest.mark.parametrize(
    "word, meant",
    [
        ("mixed_fp16", "allow_mix_precision_fp16"),
        ("force_fp61", "force_fp16"),
        ("precison mode", "precision_mode"),
        ("_".join(["fp16"] * 200), None),
    ],
)
def test_the_word_that_has_all_parts_is_meant(word, meant):
    known = ["force_fp16", "force_fp32", "allow_mix_precision", "allow_mix_precision_fp16", "precision_mode"]
    assert errors.nearest_word(word, known) == meant


@pytest.mark.parametrize(
    "bounds, legal, illegal, expected",
    [
        ({}, [0, -1e308, np.float32(0.5)], [NAN, INF, -INF, 10**400, -(10**400)], "-inf < x < inf"),
        ({"above": 0}, [1e-300, 1, np.int64(7)], [0, -0.0, -1, NAN, INF], "0 < x < inf"),
        ({"at_least": 0}, [0, 0.0, 5], [-1e-300, -INF, NAN, INF], "0 <= x < inf"),
        ({"above": 0, "below": 1}, [0.5, fractions.Fraction(1, 3)], [0, 1, NAN], "0 < x < 1"),
        ({"at_least": 0, "below": 1}, [0, 0.999], [-0.1, 1], "0 <= x < 1"),
        ({"above": 0, "at_most": 1}, [1, 1e-9, np.float16(1)], [0, 1.0001, NAN], "0 < x <= 1"),
        ({"at_least": 1, "at_most": 3.4e38}, [1, 3.4e38], [0.999, 3.5e38, 10**400], "1 <= x <= 3.4e+38"),
        ({"at_most": 0}, [0, -5], [1, NAN, -INF], "-inf < x <= 0"),
    ],
    ids=str,
)
def test_a_number_is_a_finite_one_within_its_bounds(bounds, legal, illegal, expected):
    for value in legal:
        number = arguments.check_number("Owner", "x", value, **bounds)
        assert type(number) is float and number == float(value)
    for value in illegal:
        with pytest.raises(ValueError) as refused:
            arguments.check_number("Owner", "x", value, **bounds)
        assert str(refused.value).startswith(f"Owner: x is out of range. Expected {expected}; got ")
    for value in (True, np.bool_(False), "half", None, [0.5], np.array([0.5]), 1j):
        with pytest.raises(TypeError) as refused:
            arguments.check_number("Owner", "x", value, "Use 0.5.", **bounds)
        assert str(refused.value).startswith(f"Owner: x is not a number. Expected {expected}; got {value!r} (")
        assert str(refused.value).endswith(f"({type(value).__name__}). Use 0.5.")


@pytest.mark.parametrize(
    "bounds, legal, illegal, expected",
    [
        ({}, [1, 10**30, np.int16(3)], [0, -1], "a whole number, at least 1"),
        ({"at_least": 0}, [0, np.uint8(0)], [-1], "a whole number, at least 0"),
        ({"at_least": None}, [-5, 0], [], "a whole number"),
        ({"at_most": 9}, [1, 9], [0, 10, np.int64(10)], "a whole number, at least 1 and at most 9"),
        ({"value_text": "whole steps"}, [1], [0], "whole steps, at least 1"),
    ],
    ids=str,
)
def test_a_count_is_an_integer_within_its_bounds(bounds, legal, illegal, expected):
    for value in legal:
        count = arguments.check_count("Owner", "x", value, **bounds)
        assert type(count) is int and count == value
    for value in illegal:
        with pytest.raises(ValueError) as refused:
            arguments.check_count("Owner", "x", value, **bounds)
        assert str(refused.value).startswith(f"Owner: x is out of range. Expected {expected}; got {value!r} (")
    two = (2.0, np.float32(2), fractions.Fraction(2), 2 + 0j, np.array([2]), [2], "two")
    for value in (True, np.bool_(True), NAN, INF, None, *two):
        with pytest.raises(TypeError) as refused:
            arguments.check_count("Owner", "x", value, "Use 2.", **bounds)
        assert str(refused.value).startswith(f"Owner: x is not an integer. Expected {expected}; got {value!r} (")
        assert str(refused.value).endswith(" Use 2.")


def test_a_switch_is_a_boolean_and_where_it_may_be_a_number():
    for value in (True, False, np.bool_(True), np.bool_(False)):
        for takes_numbers in (False, True):
            switch = arguments.check_switch("Owner", "x", value, takes_numbers=takes_numbers)
            assert type(switch) is bool and switch == value
    for value in (0, 1, np.int32(1)):
        assert arguments.check_switch("Owner", "x", value, takes_numbers=True) is bool(value)
        with pytest.raises(TypeError, match="Owner: x is not a boolean. Expected True or False; got"):
            arguments.check_switch("Owner", "x", value)
    for value in (2, -1, 1.0, NAN, "True", None, []):
        with pytest.raises(
            TypeError, match=r"Owner: x is not a boolean. Expected True or False; got .*\)\. Leave it out\.$"
        ):
            arguments.check_switch("Owner", "x", value, "Leave it out.", takes_numbers=True)


def test_a_choice_is_one_of_some_words():
    words = {"mean": 1, "sum": 2, "median": 3}
    assert arguments.check_choice("Owner", "x", "sum", words) == "sum"
    assert arguments.check_choice("Owner", "x", np.str_("sum"), ("sum",)) == "sum"
    for value, end in (
        ("means", "got 'means' (str). Did you mean 'mean'?"),
        ("q", "got 'q' (str). Leave it out."),
        (["mean"], "got ['mean'] (list). Leave it out."),
        (np.array(["mean", "sum"]), "Leave it out."),
        (None, "got None (NoneType). Leave it out."),
        (True, "got True (bool). Leave it out."),
    ):
        with pytest.raises(ValueError) as refused:
            arguments.check_choice("Owner", "x", value, words, "Leave it out.")
        assert str(refused.value).startswith("Owner: x has an unknown value. Expected 'mean', 'sum' or 'median'; got ")
        assert str(refused.value).endswith(end)
    with pytest.raises(ValueError, match="Expected 'mean'; got 'x'"):
        arguments.check_choice("Owner", "x", "x", ("mean",))


def test_an_object_is_of_a_class():
    thing = Thing()
    assert arguments.check_instance("Owner", "x", thing, (int, Thing), "a Thing", "Make one.") is thing
    with pytest.raises(TypeError, match=r"^Owner: x is not a Thing\. Expected a Thing; got 3 \(int\)\. Make one\.$"):
        arguments.check_instance("Owner", "x", 3, Thing, "a Thing", "Make one.")
    with pytest.raises(TypeError, match=r"^Owner: x is not a Thing\. Expected a new Thing; got 3"):
        arguments.check_instance("Owner", "x", 3, Thing, "a Thing", "Make one.", "a new Thing")


def test_a_list_is_what_can_be_iterated_over_but_for_texts_and_dictionaries():
    for value in ([1, 2], (1, 2), range(1, 3), iter([1, 2]), np.array([1, 2])):
        assert arguments.check_list("Owner", "x", value, "Write [1].") == [1, 2]
    for value in ("12", b"12", {1: 2}, 12, None):
        with pytest.raises(TypeError, match=r"^Owner: x is not a list\. Expected a list of 2; got .*\. Write \[1\]\.$"):
            arguments.check_list("Owner", "x", value, "Write [1].", expected="a list of 2")


def test_a_list_of_texts_holds_nothing_else():
    assert arguments.check_texts("Owner", "x", ("a", "b"), "Write x=[...].") == ["a", "b"]
    assert arguments.check_texts("Owner", "x", [], "Write x=[...].") == []
    for value in ("ab", {"a": 1}, 3, ["a", 3], [b"a"], [None]):
        with pytest.raises(TypeError, match=r"^Owner: x is not a list of texts\. Expected a list of texts; got "):
            arguments.check_texts("Owner", "x", value, "Write x=[...].")


def test_a_pattern_is_a_regular_expression():
    assert arguments.check_pattern("Owner", "x", "layer_[0-9]+/") == "layer_[0-9]+/"
    for value, reason in (
        ("(", "unterminated"),
        ("a{2,1}", "min repeat"),
        (3, "first argument"),
        (["a"], "unhashable"),
    ):
        with pytest.raises(
            ValueError, match=rf"^Owner: x cannot be read \(.*{reason}.*\)\. Expected a regular express"
        ):
            arguments.check_pattern("Owner", "x", value)
