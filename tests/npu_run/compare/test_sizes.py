"""Checkpoints of trainings with other seeds: how far each went is compared, in all variables together."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from npu_run.compare.arrays import open_npy
from npu_run.compare.checkpoint_files import read_checkpoint
from npu_run.compare.checkpoints import compare_checkpoints
from npu_run.compare.sizes import compare_update_sizes, is_optimizer_slot, measure_update_sizes
from npu_run.compare.verdict import NotComparableError
from tests.npu_run.compare.test_files import write_tensors

SHAPES = {"layer_0/kernel": [24, 40], "layer_1/kernel": [40, 30], "head/kernel": [30, 10], "head/bias": [10]}


def trained(folder, seed, factor=1.0, noise=0.03, names=tuple(SHAPES)):
    """Checkpoints at steps 0, 10 and 100 of something that walks at random, with a slot; gives them by step."""
    random = np.random.RandomState(seed)
    folder.mkdir(parents=True, exist_ok=True)
    own = factor * math.exp(noise * random.randn())
    values = {name: random.randn(*SHAPES[name]).astype(np.float32) for name in names}
    found = {}
    for step, length in ((0, 0.0), (10, 0.1), (100, 0.9 * own)):
        for name, value in values.items():
            values[name] = value + (length * random.randn(*value.shape)).astype(np.float32)
        slots = {f"{name}/Momentum": random.randn(*value.shape).astype(np.float32) for name, value in values.items()}
        found[step] = write_tensors(str(folder / f"seed-{seed}-{step}"), {**values, **slots})
    return found


@pytest.mark.parametrize("factor", [1.3, 1 / 1.3])
def test_another_learning_rate_is_found_behind_other_seeds(tmp_path, factor):
    repeats = [trained(tmp_path / "a", seed) for seed in range(3)]
    verdict, _ = compare_checkpoints(repeats, [trained(tmp_path / "b", 9, factor)])
    assert verdict.is_inside is False and verdict.facts["step"] == 100, verdict.sentence
    assert verdict.facts["sizes"]["factor"] == pytest.approx(factor, rel=0.1) and verdict.facts["variable"] is None
    said = r"^All variables together, B went (1\.2|1\.3|0\.7)\S* times as far as A between steps 10 and 100; repeats "
    assert re.search(said, verdict.sentence), verdict.sentence
    turned, _ = compare_checkpoints([trained(tmp_path / "b", 9, factor)], repeats)
    assert turned.facts["sizes"]["apart"] == pytest.approx(-verdict.facts["sizes"]["apart"])


def test_other_seeds_alone_are_no_alarm(tmp_path):
    random, alarms = np.random.RandomState(0), []
    for number in range(400):
        # The difference of whole trainings is up to twice the difference that their parts suggest.
        runs = [[0.1 * random.randn(16) + 0.03 * whole for _ in range(3)] for whole in random.randn(4)]
        alarms += [] if compare_update_sizes(runs[:3], runs[3:], 1e-3).do_sizes_agree else [number]
    assert len(alarms) <= 2, alarms
    runs = [trained(tmp_path, seed) for seed in range(4)]
    verdict, _ = compare_checkpoints(runs[:3], runs[3:])
    assert verdict.is_inside and verdict.facts["sizes"]["parts"] == 48


def test_what_cannot_be_measured_is_left_out(tmp_path):
    small = [trained(tmp_path / "small", seed, names=("head/bias",)) for seed in range(4)]
    verdict, _ = compare_checkpoints(small[:3], small[3:])
    assert verdict.is_inside and verdict.facts["sizes"] is None
    same = [trained(tmp_path / "same", 1)] * 3
    assert compare_checkpoints(same, same[:1])[0].facts["sizes"]["apart"] == pytest.approx(0, abs=1e-12)


def test_a_rounding_of_zero_is_no_difference(tmp_path):
    runs = []
    for number, bias in enumerate((0.0, 0.0, 0.0, 1e-45)):
        runs.append({0: write_tensors(str(tmp_path / str(number)), {"b": np.float32([bias])})})
    verdict, _ = compare_checkpoints(runs[:3], runs[3:])
    assert verdict.is_inside, verdict.sentence


def test_what_the_first_checkpoint_or_a_repeat_lacks_is_compared_where_it_is(tmp_path):
    runs = []
    for number, slot in enumerate((1.0, 1.001, 0.999, 2.0)):
        values = {"w": np.float32([1, number]), **({} if number == 1 else {"v": np.float32([3])})}
        slots = {"w/Momentum": np.float32([slot, 1])}
        tensors = {0: values, 9: {**values, **slots}}
        runs.append({step: write_tensors(str(tmp_path / f"{number}-{step}"), each) for step, each in tensors.items()})
    verdict, _ = compare_checkpoints(runs[:3], runs[3:])
    assert (verdict.is_inside, verdict.facts["step"], verdict.facts["variable"]) == (False, 9, "w/Momentum")
    assert verdict.notes == ("1 variables or slots are in B, but not in every repeat of A: v.",)


@pytest.mark.parametrize(
    "size, notes",
    [
        (1, ["1 were matched by the end of their names: scale = norm/scale."]),
        (
            3,
            [
                "1 variables or slots are in A, but not in every repeat of B: scale.",
                "1 variables or slots are in B, but not in every repeat of A: norm/scale.",
            ],
        ),
    ],
)
def test_a_name_with_a_scope_in_front_is_a_guess_that_shapes_confirm(tmp_path, size, notes):
    runs = []
    for name, count in (("scale", 1), ("norm/scale", size)):
        values = {"kernel": np.ones(5, np.float32), name: np.ones(count, np.float32)}
        runs.append([{3: write_tensors(str(tmp_path / str(len(runs))), values)}])
    verdict, _ = compare_checkpoints(*runs)
    assert verdict.is_inside and [*verdict.notes] == notes, verdict.sentence


def test_checkpoints_of_different_models_are_told(tmp_path):
    runs = []
    for names in ("abc", "ade"):
        values = {name: np.float32([number]) for number, name in enumerate(names)}
        runs.append([{3: write_tensors(str(tmp_path / names), values)}])
    said = "of different models: they share 1 variables, 2 are only in A, such as b, and 2 only in B, such as d"
    with pytest.raises(NotComparableError, match=said):
        compare_checkpoints(*runs)


def test_parts_are_the_same_however_a_file_is_read(tmp_path, monkeypatch):
    before, after = np.random.RandomState(0).randn(2, 1024).astype(np.float32)
    for name, values in (("before", before), ("after", after), ("nan", np.where(after > 2, np.nan, after))):
        np.save(tmp_path / f"{name}.npy", values)
    before_file, after_file, nan_file = (open_npy(str(tmp_path / f"{name}.npy")) for name in ("before", "after", "nan"))
    found = measure_update_sizes(before_file, after_file)
    expected = [np.mean(part.astype(np.float64) ** 2) for part in np.array_split(after - before, 16)]
    np.testing.assert_allclose(found, 0.5 * np.log(expected))
    monkeypatch.setattr("npu_run.compare.arrays._PIECE", 77)
    np.testing.assert_allclose(measure_update_sizes(before_file, after_file), found)
    assert (
        measure_update_sizes(before_file, before_file) is None and measure_update_sizes(before_file, nan_file) is None
    )


def test_slots_are_told_from_variables_by_their_names(tmp_path):
    tensors = read_checkpoint(trained(tmp_path, 0)[0])
    assert [name for name in tensors if not is_optimizer_slot(name, tensors)] == sorted(SHAPES)
