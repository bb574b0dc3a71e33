"""The page of a run: what a run folder gives, how steps are cut into buckets, what the page says of them."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import re
import sys

import click.testing
import pytest

from npu_bridge.reporting import History, StepRow, picture
from npu_bridge.reporting.page import RunFolder, axes, facts, read_run_folder, render_page, write_page
from npu_bridge.reporting.page.curves import MOST_BUCKETS, make_curves
from npu_bridge.reporting.page.run_folder import NoRunError
from npu_bridge.reporting.picture_style import COLOURS
from npu_run.compare import page as compare_page
from npu_run.compare.folders import compare_folders
from npu_run.compare.page import render_comparison
from npu_run.report import report
from tests.reporting.stepping import Clock


def write_history(folder, losses, skipped=(), low=0, restarts=(), ranks=2):
    """Steps at 10 a second; the scale is halved by each skipped one."""
    history = History(os.path.join(folder, "history.jsonl"), Clock(1e9, per_look=0.1))
    step, scale = 0, 2.0**16
    history.begin_session(0, ranks=ranks)
    for number, loss in enumerate(losses):
        if number in restarts:
            history.begin_session(step, ranks=ranks)
        step += number not in skipped
        precision = "float16" if number < low else "float32"
        history.append(step, loss, scale, number in skipped, 0.25, precision if low else None)
        scale /= 2 if number in skipped else 1
    history.close()
    return history


def test_extremes_survive_a_hundred_thousand_steps_in_less_than_two_megabytes(tmp_path):
    losses = [2.0 + math.sin(number) for number in range(100_000)]
    losses[70_001], losses[33_333], losses[5] = 4000.0, 1e-3, math.nan
    history, skipped = History(str(tmp_path / "history.jsonl")), {4, 50_000}
    steps = itertools.accumulate(number not in skipped for number in range(len(losses)))
    history.entries = [
        StepRow(step, losses[number], 2.0**15 if number > 4 else 2.0**16, number in skipped, number / 10)
        for number, step in enumerate(steps)
    ]
    curves = make_curves(history)
    assert len(curves.buckets) <= MOST_BUCKETS and curves.steps_per_bucket == 125
    assert max(bucket.loss.high for bucket in curves.buckets) == 4000.0
    assert min(bucket.loss.low for bucket in curves.buckets) == 1e-3
    assert sum(bucket.skipped for bucket in curves.buckets) == 2 and curves.buckets[0].not_finite == 1
    assert (curves.buckets[-1].last, curves.buckets[-1].step) == (100_000, 99_998)
    assert curves.buckets[0].loss_scale[:2] == (2.0**15, 2.0**16)
    page = render_page(RunFolder(str(tmp_path), history, {}, None))
    assert len(page.encode()) < 2_000_000
    rows = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["rows"]
    assert max(row[5] for row in rows) == 4000.0 and min(row[3] for row in rows) == 1e-3
    assert "4000" in re.sub(",", "", page), "the table names the highest"


def test_speed_leaves_out_what_lies_between_sessions(tmp_path):
    history = write_history(tmp_path, [1.0] * 9, restarts={4})
    pause = [0] * 5 + [500] * 6
    history.entries = [entry._replace(time=entry.time + secs) for entry, secs in zip(history.entries, pause)]
    curves = make_curves(history)
    assert curves.restarts == [4]
    assert [speed.first for speed in curves.speeds] == [1, 2, 3, 5, 6, 7, 8]
    assert {round(speed.steps_per_sec) for speed in curves.speeds} == {10}


def test_the_pace_has_no_short_piece_at_the_end(tmp_path):
    history = write_history(tmp_path, [1.0] * 301)
    history.entries[-1] = history.entries[-1]._replace(time=history.entries[-1].time + 5)  # a checkpoint is saved
    pieces = make_curves(history).speeds
    assert {speed.last - speed.first for speed in pieces[:-1]} == {5} and pieces[-1].last == 301
    assert pieces[-1].last - pieces[-1].first >= 5 and pieces[-1].steps_per_sec > 0.9
    at_once = [entry._replace(time=1e9) for entry in history.entries]
    history.entries = at_once
    assert make_curves(history).speeds == []


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL))


def test_the_tile_and_the_end_of_the_curve_have_the_same_loss_and_say_what_it_is(tmp_path):
    write_history(tmp_path, [6.0 - number / 100 for number in range(62)])
    page = render_page(read_run_folder(str(tmp_path)))
    assert "loss, last step 5.3900 mean of the last 10: 5.4350, first: 6.0000" in text_of(page)
    assert re.search(r'<text class="last "[^>]*>5.3900<tspan class="note"[^>]*>last step</tspan>', page)
    write_history(tmp_path / "long", [6.0 - number / 1000 for number in range(2000)])
    page = render_page(read_run_folder(str(tmp_path / "long")))
    assert "loss, last step 4.0010 " in text_of(page) and '4.0015<tspan class="note"' in page
    assert ">mean of 2</tspan>" in page


def test_a_single_evaluation_is_a_tile_and_no_empty_panel(tmp_path):
    history = write_history(tmp_path, [4.0, 3.0, 2.0, 1.0])
    history.append_evaluation(4, {"accuracy": 0.75}, name="held-out")
    page = render_page(read_run_folder(str(tmp_path)))
    assert 'data-name="evaluated"' not in page and "accuracy held-out 0.75000 step 4" in text_of(page)


def test_evaluations_batch_parameters_and_memory_are_shown(tmp_path):
    history = write_history(tmp_path, [4.0, 3.0, 2.0, 1.0])
    history.note_facts(4, samples_per_step=64, parameters=1234567, memory_bytes={0: 2_500_000_000, 1: 3_000_000_000})
    history.append_evaluation(2, {"accuracy": 0.5, "loss": 3.25}, batches=12, secs=1.4)
    history.append_evaluation(4, {"accuracy": 0.75, "loss": 1.25, "auc": math.nan}, batches=12, secs=1.4)
    page = render_page(read_run_folder(str(tmp_path)))
    text = text_of(page)
    assert "batch 64 samples, 32 on each rank" in text and "trained parameters 1,234,567" in text
    assert "step loss accuracy auc batches time 2 3.2500 0.50000 12 1.4 s 4 1.2500 0.75000 nan 12 1.4 s" in text
    assert "rank peak memory 0 2.50 GB 1 3.00 GB" in text
    assert page.count('<circle class="evaluation"') == 4 and "evaluation at step 4: 1.2500</title>" in page
    assert 'data-name="evaluated"' in page and "Evaluation: accuracy" in page and "Evaluation: auc" not in page
    rows = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["evaluations"]
    assert rows[1] == [4, "evaluation at step 4\n  accuracy 0.75000\n  loss 1.2500\n  auc nan"]


def test_the_colours_of_both_kinds_of_page_and_of_pictures_are_the_same(tmp_path):
    write_history(tmp_path, [4.0, 3.0])
    found = compare_folders(str(tmp_path), str(tmp_path))
    for text in (render_page(read_run_folder(str(tmp_path))), render_comparison(found)):
        for name, (light, dark) in COLOURS.items():
            assert f"--{name}: {light};" in text and f"--{name}: {dark};" in text
        style = re.search("<style>(.*)</style>", text, re.DOTALL)[1]
        assert set(re.findall(r"var\(--(\w+)\)", style)) <= set(re.findall(r"--(\w+):", style))
    assert not re.search("#[0-9a-f]{6}", inspect.getsource(picture) + inspect.getsource(compare_page))


def test_one_step_and_none(tmp_path):
    with pytest.raises(NoRunError, match=r"holds no steps.*HistoryHook"):
        write_page(str(tmp_path))
    with pytest.raises(NoRunError, match="there is no folder"):
        write_page(str(tmp_path / "nowhere"))
    write_history(tmp_path, [math.nan])
    with pytest.raises(NoRunError, match="holds no timeline"):
        write_page(str(tmp_path), timeline=str(tmp_path))
    page = write_page(str(tmp_path))
    assert page == str(tmp_path / "report.html") and "1 step" in (tmp_path / "report.html").read_text()
    assert sorted(os.listdir(tmp_path)) == ["history.jsonl", "report.html"]


def test_what_the_training_noted_is_shown_and_nothing_of_it_becomes_markup(tmp_path, monkeypatch):
    write_history(tmp_path, [4.0, 3.0, 2.0], skipped={1}, low=2)
    script = tmp_path / "<b>train.py"
    script.write_text("")
    arguments = [str(script), "--steps", "3", "--api-key=abc123", "--token", "xyz789", "--max_tokens=5"]
    arguments += ["--wandb_key=abc124", "--accessToken", "xyz780", "private_key=abc125", "--keyboard=de"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setenv("AOE_MODE", "</script><script>alert(1)</script>")
    options = {"precision_mode": "force_fp16", "iterations_per_loop": 1}
    ranks = [{"host": "a", "cores": 2}, {"host": "a", "cores": 2}]
    facts.note_run(str(tmp_path), str(tmp_path / "history.jsonl"), options, ranks, [])
    page = render_page(read_run_folder(str(tmp_path)))
    assert "npu-run -np 2" in page and "--max_tokens=5" in page and "--api-key=***" in page
    assert "abc12" not in page and "xyz78" not in page and "--keyboard=de" in page
    assert "NPURunConfig.precision_mode" in page and "NPURunConfig.iterations_per_loop" not in page
    assert "<b>train" not in page and "alert(1)" in page and "<script>alert" not in page
    assert page.count("<script") == 2 and "http://" not in page and "https://" not in page
    assert 'class="lowered"' in page and "1 step skipped" in page


@pytest.mark.parametrize(
    "arguments, ranks, hosts, by_launcher, expected",
    [
        (["-c"], 1, (), False, ""),
        ([__file__], 1, (), False, f"python {__file__}"),
        ([__file__, "a b"], 1, (), True, f"npu-run {__file__} 'a b'"),
        ([__file__], 3, ("x", "x", "y"), True, f"npu-run -np 3 -H x:2,y:1 {__file__}"),
    ],
)
def test_the_command_to_repeat(arguments, ranks, hosts, by_launcher, expected, monkeypatch):
    assert facts.command_line(arguments, ranks, hosts, by_launcher) == expected
    monkeypatch.setenv("NPU_RUN_SET", '["hccl_timeout=5"]')
    again = facts.command_line(arguments, ranks, hosts, by_launcher)
    assert again == (expected.replace(f" {__file__}", f" --set hccl_timeout=5 {__file__}") if by_launcher else expected)


def test_a_timeline_is_a_picture_with_times_for_each_rank(tmp_path):
    write_history(tmp_path, [4.0, 3.0])
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "tail.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    traces = [{"rank": rank, "duration_ms": 20.0 + rank, "exposed_ms": 2.5} for rank in (0, 1)]
    tail = {"steps": [5, 6], "step_ms": 20.0, "exposed_ms": 2.5, "traces": traces}
    (tmp_path / "timeline" / "tail.json").write_text(json.dumps(tail))
    page = render_page(read_run_folder(str(tmp_path)))
    assert "data:image/svg+xml;base64," in page and "Recorded steps 5 to 6" in page
    assert "<td>1</td><td>21.0 ms</td><td>2.5 ms</td>" in page


@pytest.mark.parametrize("numbers", [[0.0], [5.0], [-3.0, 2.0], [1e-9, 3e-9], [0.5, 0.5000001], [1e30, 2e30]])
def test_axes_hold_their_numbers(numbers):
    made = [axes.make_linear_axis(numbers, 100, 0), axes.make_linear_axis(numbers, 100, 0, from_zero=True)]
    if min(numbers) > 0:
        made += [axes.make_logarithmic_axis(numbers, 100, 0), axes.make_power_of_two_axis(numbers, 100, 0)]
    for axis in made:
        places = [axis.position_of(number) for number in numbers]
        assert all(0 <= place <= 100 for place in places) and places == sorted(places, reverse=True)
        assert len(axis.ticks) <= 8 and all(axis.low <= tick <= axis.high for tick in axis.ticks)


def test_the_command_says_what_it_made_or_what_is_missing(tmp_path):
    write_history(tmp_path, [4.0, 3.0])
    runner = click.testing.CliRunner()
    done = runner.invoke(report, [str(tmp_path), "-o", str(tmp_path / "own.html")])
    assert done.exit_code == 0 and "own.html (" in done.output and (tmp_path / "own.html").exists()
    refused = runner.invoke(report, [str(tmp_path / "nowhere")])
    assert refused.exit_code == 2 and "npu-run report: there is no folder" in refused.output
