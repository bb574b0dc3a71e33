"""The code of docs/precision.md runs unchanged."""

from __future__ import annotations

import pathlib

import keras
import pytest

from npu_bridge.options.table_precision import PRECISION_MODES, PRECISION_MODES_V2
from tests.loose_code import cut_pieces

PAGE = (pathlib.Path(__file__).parents[3] / "docs" / "precision.md").read_text()
EXAMPLES = [
    *cut_pieces("docs/precision.md"),
    *(piece for piece in cut_pieces("docs/amp.md") if "from_opt_level" in piece.co_names),
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_code_runs_as_it_stands(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    try:
        exec(EXAMPLES[number], names)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    if "layers" in names:
        assert names["model"].layers[0].compute_dtype == "float16"
        assert 2.0**10 < names["model"].optimizer.last_step.loss_scale <= 2.0**15
    if "callback" in names:
        assert str(names["callback"].policy) == "the dtypes of the graph"
    if "tell" in names:
        assert "step 20/20 (100 %) | float32 | " in capsys.readouterr().out
    if "level" in names:
        assert names["make_loss_scale_manager"]().get_loss_scale() == 2.0**16


def test_the_examples_are_all_there():
    assert len(EXAMPLES) == 5


def test_the_page_names_every_mode():
    for mode in (*PRECISION_MODES, *PRECISION_MODES_V2):
        assert f"`{mode}`" in PAGE, mode
