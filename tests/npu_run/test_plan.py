"""npu-run plan: units, the page, JSON, the picture, and refusals in one line."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from npu_bridge.reporting import History
from npu_run.errors import LaunchError
from npu_run.predict import units
from npu_run.predict.command import format_secs, plan
from tests.npu_run.launching import npu_run
from tests.reporting.stepping import Clock

BASE = ["--params", "110M", "--bandwidth", "10Gbit", "--latency", "50us"]


def run(*arguments):
    return CliRunner().invoke(plan, [*BASE, *map(str, arguments)])


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_count, "25600000", 25_600_000),
        (units.parse_count, "110M", 110_000_000),
        (units.parse_count, "1.3B", 1_300_000_000),
        (units.parse_count, "2.5k", 2500),
        (units.parse_bytes_per_sec, "1Gbit", 125e6),
        (units.parse_bytes_per_sec, "300 Mbit/s", 37.5e6),
        (units.parse_bytes_per_sec, "100Gbps", 12.5e9),
        (units.parse_bytes_per_sec, "125MB/s", 125e6),
        (units.parse_bytes_per_sec, "1.5GB", 1.5e9),
        (units.parse_bytes_per_sec, "10MBps", 1e7),
        (units.parse_secs, "50us", 50e-6),
        (units.parse_secs, "0.2ms", 0.2e-3),
        (units.parse_secs, "0.2", 0.2),
        (units.parse_secs, "1.5 s", 1.5),
        (units.parse_ranks, "8,1,2", [1, 2, 8]),
        (units.parse_ranks, "1..4096", [2**power for power in range(13)]),
        (units.parse_ranks, "3..20,100", [3, 4, 8, 16, 20, 100]),
        (units.parse_ranks, "5..5", [5]),
        (units.parse_ranks, "1..5", [1, 2, 4, 5]),
    ],
)
def test_numbers_are_read_as_people_write_them(parse, text, value):
    assert parse(text, "--x") == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (units.parse_count, ["", "M", "0", "-3", "1e", "110Mb", "many"]),
        # One letter says neither bits nor bytes.
        (units.parse_bytes_per_sec, ["1G", "0Gbit", "Gbit", "-1Gbit", "1Gbit/h"]),
        (units.parse_secs, ["", "50 minutes", "-1ms", "us"]),
        (units.parse_ranks, ["", "0", "4..2", "1..", "a", "1,,2", "0..4", "1..99999999"]),
    ],
)
def test_what_is_not_understood_is_refused_with_an_example(parse, texts):
    for text in texts:
        with pytest.raises(LaunchError) as error:
            parse(text, "--option")
        assert str(error.value).startswith("--option is not understood. Expected ")
        assert "such as" in str(error.value) and str(error.value).endswith(f"got {text!r}.")


@pytest.mark.parametrize(
    ("secs", "text"), [(0.0, "0"), (12.345e-6, "12.3 us"), (0.0456, "45.6 ms"), (1.5, "1.5 s"), (1234.0, "1234 s")]
)
def test_times_are_shown_in_fitting_units(secs, text):
    assert format_secs(secs) == text


def test_page_has_a_row_for_each_number_of_ranks_and_a_line_to_paste(tmp_path):
    model = ["--params", "2M", "--bandwidth", "100Mbit", "--compute-secs", "600ms"]
    loaded = "import atexit, sys\natexit.register(lambda: print({'tensorflow', 'horovod', 'numpy'} & set(sys.modules)))"
    code, output = npu_run("plan", *model, "--ranks", "1,2,8", cwd=tmp_path, prepare=loaded)
    assert code == 0 and "\x1b" not in output
    heading, *rows = output.split("\n\n")[0].splitlines()
    assert heading.split()[0] == "ranks"
    assert [row.split()[0] for row in rows] == ["1", "2", "8"]
    assert rows[0].split()[1:] == ["0", "600", "ms", "600", "ms", "0", "100", "%", "-", "-"]
    assert "8 MB of gradients on the wire, 600 ms of computation, links of 0.1 Gbit/s with 50 us each way." in output
    *_, call, loaded = output.splitlines()
    assert loaded == "set()"
    assert call.startswith("For 8 ranks, before compute_gradients: set_split_strategy_by_size([")
    shares = json.loads(call[call.index("[") : -1])
    assert len(shares) > 1 and sum(shares) == pytest.approx(100)


def test_json_holds_the_numbers_and_wire_formats_halve_the_bytes():
    model = ["--params", "1M", "--json", "--ranks", "2"]
    whole, half = (json.loads(run(*model, "--wire", wire).output) for wire in ("none", "bfloat16"))
    assert (whole["gradient_bytes"], whole["wire_bytes"], half["wire_bytes"]) == (4e6, 4e6, 2e6)
    (before,), (after,) = whole["predictions"], half["predictions"]
    # 2 messages of half the bytes over 94 % of 1.25 GB/s are all that changes.
    saved = before["communication_secs"] - after["communication_secs"]
    assert saved == pytest.approx(2e6 / (0.94 * 1.25e9))
    assert before["exposed_secs"] == before["step_secs"] == before["communication_secs"]


def test_host_rate_bounds_fast_links():
    fast = ["--params", "1B", "--bandwidth", "400Gbit", "--ranks", "2", "--json"]
    slow, quick = (
        json.loads(CliRunner().invoke(plan, [*fast, "--host-bytes-per-sec", rate]).output)["predictions"][0]
        for rate in ("2GB/s", "20GB/s")
    )
    assert slow["communication_secs"] - quick["communication_secs"] == pytest.approx(4e9 / 2e9 - 4e9 / 20e9)


def write_run(folder, ranks=1, steps=10):
    """A training of four steps a second."""
    folder.mkdir()
    history = History(str(folder / "history.jsonl"), Clock(1e9, per_look=0.25))
    history.begin_session(0, ranks=ranks)
    for step in range(steps):
        history.append(step + 1, 1.0, None, False)
    history.close()


def test_step_time_comes_from_the_folder_of_a_training(tmp_path):
    write_run(tmp_path / "out")
    assert json.loads(run("--json", "--from-run", tmp_path / "out").output)["compute_secs"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--ranks", "many"], "--ranks is not understood"),
        (["--latency", "soon"], "--latency is not understood"),
        (["--tensors", "0"], "--tensors is not understood"),
        (["--compute-secs", "1", "--from-run", "x"], "exclude each other"),
        (["--from-run", "missing"], "missing cannot be used: there is no folder 'missing'"),
        (["--from-run", "."], ". cannot be used: . holds no steps of a training"),
        (["--from-run", "two"], "is of a run on 2 ranks, whose steps include communication"),
        (["--from-run", "short"], "has too few steps to tell their time"),
        (["--out", "no/such/folder/plan.png"], "--out no/such/folder/plan.png: "),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "two", ranks=2)
    write_run(tmp_path / "short", steps=1)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith("npu-run plan: ") and part in result.output
    assert len(result.output.splitlines()) == 1


def test_picture_is_drawn_over_ranks(tmp_path):
    path = tmp_path / "plan.png"
    assert run("--ranks", "1..64", "--compute-secs", "0.2", "--out", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_picture_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--out", tmp_path / "plan.png")
    assert result.exit_code == 2
    assert "pip install 'npu-bridge[plot]'" in result.output and len(result.output.splitlines()) == 1


def test_the_gain_of_overlapping_steps_is_told_or_that_there_is_none():
    model = ["--params", "20M", "--compute-secs", "318ms", "--tensors", "60"]
    slow = run(*model, "--bandwidth", "1Gbit", "--ranks", "1,2").output
    heading, alone, together = slow.splitlines()[:3]
    end = heading.index("overlapping") + len("overlapping")
    assert (alone[:end].split()[-1], together[:end].split()[-2:]) == ("-", ["781", "ms"])
    assert "save 11 % of the step with the unset split on 2 ranks" in slow
    fast = run(*model, "--bandwidth", "25Gbit", "--ranks", "2").output
    assert "Overlapping steps (iterations_per_loop above 4) would gain nothing" in fast
    facts = json.loads(run(*model, "--bandwidth", "1Gbit", "--ranks", "1,2", "--json").output)["predictions"]
    assert facts[0]["overlapped_secs"] is None and facts[1]["overlapped_secs"] == pytest.approx(0.781, abs=1e-3)
