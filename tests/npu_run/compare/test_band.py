"""The band of repeats: what stays inside, what leaves it and where, and what cannot be told."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from npu_run.compare.band import compare_losses, judge_losses, measure_band
from npu_run.compare.losses import Losses, read_losses, read_repeats
from npu_run.compare.spread import running_medians, t_quantile
from npu_run.compare.verdict import NotComparableError
from tests.reporting.test_page import write_history

STEPS = 120


def curve(count=STEPS):
    return 2 + 3 * np.exp(-np.arange(count) / 30)


def run_of(values, first=1):
    values = np.asarray(values, float)
    return Losses("a/repeat-0", np.arange(first, first + len(values)), values, 1)


def white(rng, count=STEPS):
    return 0.05 * rng.standard_normal(count)


def drifting(rng, count=STEPS):
    return white(rng, count) + 0.1 * np.cumsum(rng.standard_normal(count)) / np.sqrt(count)


def growing(rng, count=STEPS):
    """Rounding: one small number for each run grows a millionfold, in a direction that each step shares."""
    shared = np.random.default_rng(7).standard_normal(count)
    return rng.standard_normal() * 1e-7 * np.exp(np.linspace(0, 14, count)) * shared


NOISES = {"white": white, "drifting": drifting, "growing": growing}


@pytest.mark.parametrize("chance, freedom, expected", [(0.05, 1, 12.7062), (0.01, 2, 9.92484), (0.001, 30, 3.64596)])
def test_quantiles_are_those_of_tables(chance, freedom, expected):
    assert t_quantile(chance, freedom) == pytest.approx(expected, rel=1e-5)


def test_medians_of_windows_need_memory_for_the_steps_alone():
    rows = np.random.default_rng(10).standard_normal((3, 3000)).round(2)
    rows[0, 40], rows[1, 50], rows[2, 60:62] = np.nan, np.inf, -np.inf
    for length in (1, 2, 7, 750, 1501, 3000, 4000):
        windows = np.lib.stride_tricks.sliding_window_view(rows, min(length, 3000), axis=1)
        tracemalloc.start()
        medians = running_medians(rows, length)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 * rows.nbytes
        np.testing.assert_array_equal(medians, np.median(windows, axis=2))


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("count", [20, STEPS])
def test_repeats_raise_no_alarm(noise, count):
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(60):
        runs = [run_of(curve(count) + NOISES[noise](rng, count)) for _ in range(4)]
        alarms += judge_losses(measure_band(runs[:3]), runs[3:]).is_inside is False
    assert alarms == 0


def test_a_shift_is_found_where_it_begins():
    rng, found = np.random.default_rng(2), []
    for _ in range(20):
        runs = [run_of(curve() + white(rng)) for _ in range(5)]
        other = run_of(curve() + white(rng) + np.where(np.arange(STEPS) >= 50, 0.4, 0.0))
        verdict = judge_losses(measure_band(runs), [other])
        assert verdict.is_inside is False and "and never came back: loss " in verdict.sentence
        found.append(verdict.facts["step"])
    assert np.median(found) == 51 and min(found) > 45 and max(found) < 57


def test_a_departure_of_rounding_is_found_at_its_step():
    rng = np.random.default_rng(3)
    runs = [run_of(curve() + growing(rng)) for _ in range(3)]
    other = run_of(curve() + growing(rng) + np.where(np.arange(STEPS) >= 50, 0.01, 0.0))
    verdict = judge_losses(measure_band(runs), [other])
    assert verdict.facts["step"] == 51
    assert verdict.sentence.startswith("B left the band of A at step 51 and was inside again after step 8")


def test_spikes_of_single_steps_are_no_departure_and_a_return_is_told():
    rng = np.random.default_rng(4)
    band = measure_band([run_of(curve() + white(rng)) for _ in range(4)])
    spiked = curve() + white(rng)
    spiked[[10, 60, 90]] += 30
    assert judge_losses(band, [run_of(spiked)]).is_inside
    away = curve() + white(rng) + np.where(abs(np.arange(STEPS) - 40) < 15, 1.0, 0.0)
    verdict = judge_losses(band, [run_of(away)])
    assert 24 <= verdict.facts["step"] <= 28 and 52 <= verdict.facts["back"] <= 60
    assert "and was inside again after step" in verdict.sentence


@pytest.mark.parametrize("common", [1, 3, 7])
def test_a_few_steps_in_common_are_judged_too(common):
    rng = np.random.default_rng(11)
    band = measure_band([run_of(curve() + white(rng)) for _ in range(3)])
    verdicts = [
        judge_losses(band, [run_of(curve(common) + apart + white(rng, common))]) for apart in [0.0] * 60 + [5.0]
    ]
    assert [verdict.is_inside for verdict in verdicts] == [True] * 60 + [False]


def test_losses_that_are_no_numbers_leave_the_band_at_once():
    rng = np.random.default_rng(5)
    band = measure_band([run_of(curve() + white(rng)) for _ in range(3)])
    broken = curve()
    broken[70:] = np.nan
    verdict = judge_losses(band, [run_of(broken)])
    assert (verdict.is_inside, verdict.facts["step"]) == (False, 71)
    assert verdict.sentence.startswith("The loss of B is not finite at step 71: nan")


def test_repeats_on_the_other_side_make_the_band_too():
    rng = np.random.default_rng(6)
    many = [run_of(curve() + white(rng)) for _ in range(4)]
    verdict, band = compare_losses([run_of(curve() + 1.0)], many)
    assert band.repeats == 4 and verdict.sentence.startswith("A left the band of B at step 1 ")


def test_without_repeats_equal_is_inside_far_is_outside_and_the_rest_cannot_be_told():
    rng = np.random.default_rng(8)
    base = curve() + white(rng)
    assert compare_losses([run_of(base)], [run_of(base)])[0].is_inside
    verdict, band = compare_losses([run_of(base)], [run_of(base + 1e-4)])
    assert verdict.is_inside is None and "npu-run --repeat 3" in verdict.sentence and band is None
    verdict, _ = compare_losses([run_of(base)], [run_of(base + np.where(np.arange(STEPS) >= 60, 2.0, 0.0))])
    assert verdict.is_inside is False and verdict.facts["step"] == 61


def parting(size, equal=62, growth=1.0, **more):
    """Two trainings that are equal bit for bit, then differ by a part of the loss, which grows from step to step."""
    base = (curve() + white(np.random.default_rng(9))).astype(np.float32)
    after = np.maximum(np.arange(STEPS) - equal, 0)
    other = np.where(np.arange(STEPS) >= equal, base * (1 + size * growth**after), base)
    return [[run_of(values)._replace(**more)] for values in (base, other)]


def test_losses_that_part_at_once_after_equal_bits_are_outside():
    for size in (1.0, 0.3, 1e-3, 1e-4):
        verdict, _ = compare_losses(*parting(size))
        assert (verdict.is_inside, verdict.facts["step"], verdict.facts["equal_steps"]) == (False, 63, 62)
    assert verdict.sentence.startswith("A and B differ from step 63 on: loss 2.3068 against 2.3066. ")
    assert "The 62 steps before are equal bit for bit, so this is not noise." in verdict.sentence


@pytest.mark.parametrize(
    "a, b",
    [
        parting(1e-7, growth=1.2),  # rounding, which grows slowly
        parting(0.01, equal=5),  # too few steps to tell
        parting(0.01, precision="bfloat16"),  # one number rounded the other way
    ],
)
def test_what_may_be_rounding_is_not_called_different(a, b):
    assert compare_losses(a, b)[0].is_inside is None


def test_steps_that_were_not_recorded_leave_room_for_rounding_to_grow():
    a, b = ([run[0]._replace(steps=1 + 8 * np.arange(STEPS))] for run in parting(1e-3))
    assert compare_losses(a, b)[0].is_inside is None


def test_a_loss_that_stands_still_proves_nothing():
    still = np.full(STEPS, 0.5)
    assert compare_losses([run_of(still)], [run_of(np.where(np.arange(STEPS) == 119, 0.6, still))])[0].is_inside is None


def test_repeats_that_do_not_differ_are_no_band():
    base = curve()
    with pytest.raises(NotComparableError, match="are identical, so there is no band; vary something else"):
        measure_band([run_of(base)] * 3)
    verdict, _ = compare_losses([run_of(base)] * 3, [run_of(base * (1 + 1e-6))])
    assert verdict.is_inside is None and "identical" in verdict.notes[0]
    assert compare_losses([run_of(base)] * 3, [run_of(base)])[0].is_inside


def test_what_cannot_be_compared_is_one_sentence():
    with pytest.raises(NotComparableError, match="One training has no band"):
        measure_band([run_of(curve())])
    with pytest.raises(
        NotComparableError, match="no step in common: A has losses of the steps 1 to 120, B of 500 to 619"
    ):
        compare_losses([run_of(curve())], [run_of(curve(), first=500)])
    with pytest.raises(NotComparableError, match="no step with a finite loss in common"):
        compare_losses([run_of([np.inf, np.nan])], [run_of([np.nan, np.nan])])


def test_folders_of_repeats_are_read_in_order(tmp_path):
    for number in (10, 2, 0):
        write_history(str(tmp_path / f"repeat-{number}"), [5.0 + number, 4.0, 3.0, 2.0], skipped={1})
    runs = read_repeats(str(tmp_path))
    assert [run.values[0] for run in runs] == [5.0, 7.0, 15.0]
    assert list(runs[0].steps) == [1, 2, 3] and list(runs[0].values) == [5.0, 3.0, 2.0], "the skipped step is left out"
    assert runs[0].ranks == 2
    assert json.dumps(compare_losses(runs, runs[:1])[0].facts)


def test_folders_without_losses_are_refused(tmp_path):
    with pytest.raises(NotComparableError, match="There is no"):
        read_losses(str(tmp_path / "nowhere"))
    with pytest.raises(NotComparableError, match="holds no losses; expected history.jsonl"):
        read_losses(str(tmp_path))
    (tmp_path / "history.jsonl").write_bytes(b"\x00\xff" * 400)
    with pytest.raises(NotComparableError, match="holds no losses"):
        read_losses(str(tmp_path))
