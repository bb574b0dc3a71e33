"""The picture: a PNG of the announced size, for every kind of history."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from npu_bridge.reporting import History, MissingExtraError, draw_training, smooth
from tests.reporting.stepping import Clock
from tests.small_disk import small_disk  # noqa: F401 - a fixture

pytest.importorskip("matplotlib")


@pytest.fixture
def history(tmp_path):
    return History(str(tmp_path / "history.jsonl"), Clock(per_look=0.1))


def size_of(path):
    """Width and height in pixels, from the header of a PNG file."""
    with open(path, "rb") as file:
        header = file.read(24)
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:24])


def test_loss_and_scale_with_overflows_and_a_restart(history, tmp_path):
    history.begin_session(0)
    for step in range(1, 60):
        history.append(step, 8.0 / step, 2.0 ** (20 - step // 10), step % 20 == 0)
    history.begin_session(40)
    for step in range(41, 60):
        history.append(step, 8.0 / step, 2.0**16, False)
    path = str(tmp_path / "training.png")
    draw_training(history, path, title="A run")
    assert size_of(path) == (1200, 744)


def test_a_link_is_replaced_and_what_it_leads_to_stays(history, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "training.png").symlink_to(tmp_path / "mine")
    history.begin_session(0)
    history.append(1, 1.0, None, False)
    draw_training(history, str(tmp_path / "training.png"))
    assert size_of(tmp_path / "training.png") == (1200, 528) and (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("losses", [[math.nan], [math.inf, 1.0], [None], [1e9, 1.0, 1e-3]])
def test_odd_losses_are_drawn(history, tmp_path, losses):
    history.begin_session(0)
    for step, loss in enumerate(losses, 1):
        history.append(step, loss, math.inf if step == 2 else 4.0, True)
    path = str(tmp_path / "training.png")
    draw_training(history, path)
    assert size_of(path) == (1200, 744)


def test_empty_history_is_refused(history, tmp_path):
    with pytest.raises(ValueError, match="no step"):
        draw_training(history, str(tmp_path / "training.png"))


def test_missing_matplotlib_names_the_extra(history, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'npu-bridge\[plot\]'"):
        draw_training(history, str(tmp_path / "training.png"))


def test_smoothing_keeps_a_straight_line_and_does_not_lag():
    line = np.arange(20.0)
    np.testing.assert_allclose(smooth(line, half_width=3)[3:-3], line[3:-3])


def test_smoothing_passes_over_what_is_not_finite():
    np.testing.assert_allclose(smooth([1.0, math.nan, 1.0], half_width=1), [1.0, 1.0, 1.0])
    assert np.isnan(smooth([math.nan], half_width=2)).all()
    np.testing.assert_array_equal(smooth([3.0, 1.0, 2.0], half_width=0), [3.0, 1.0, 2.0])


def test_who_has_no_home_reads_nothing_about_matplotlib(tmp_path):
    code = "import logging; logging.basicConfig(level=20); from npu_bridge.reporting.picture_style import new_figure; "
    code += "new_figure('the test', 4.0)"
    names = {name: text for name, text in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CACHE_HOME")}
    names |= {"HOME": "/proc", "XDG_CONFIG_HOME": "/proc", "TMPDIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=names, capture_output=True, text=True, check=True)
    assert ran.stderr == ""


def test_a_training_goes_on_where_matplotlib_cannot_be_loaded(history, tmp_path, small_disk):  # noqa: F811
    history.begin_session(0)
    history.append(1, 1.0, None, False)
    code = "import tempfile; from npu_bridge.reporting import History, draw_training; "
    code += (
        f"tempfile.tempdir = {str(small_disk.path)!r}; draw_training(History({history.path!r}), 'a.png'); print('on')"
    )
    names = {name: text for name, text in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CACHE_HOME")}
    names |= {"HOME": "/proc", "XDG_CONFIG_HOME": "/proc"}
    subprocess.run(["mount", "-o", "remount,ro", small_disk.path], check=True)
    ran = subprocess.run([sys.executable, "-c", code], env=names, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout == "on\n" and "the picture a.png is not written any more: " in ran.stderr
