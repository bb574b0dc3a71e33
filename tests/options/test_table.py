"""An option is written in one place and turns up everywhere."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.options import OPTIONS, make_session_config, read_run_config, read_session_config
from npu_bridge.options.construction import declare_constructor
from npu_bridge.options.environment_table import VARIABLES
from npu_bridge.options.kinds import Integer
from npu_bridge.options.table import RUN_CONFIG, Option, OptionTable, recorded
from tools import options_pages

FAKE = Option(89, "fake_level", Integer(0, 3), "A made-up level.", recorded("Made up."), default=1)


def test_one_entry_is_enough_for_a_new_option(monkeypatch):
    with pytest.raises(TypeError, match="fake_level"):
        NPURunConfig(fake_level=2)
    for name, value in vars(OptionTable([*OPTIONS, FAKE])).items():
        monkeypatch.setattr(OPTIONS, name, value)

    @declare_constructor(RUN_CONFIG)
    class Extended(NPURunConfig):
        """One option more."""

    assert list(inspect.signature(Extended).parameters)[-1] == "fake_level"
    assert "fake_level: A made-up level." in Extended.__doc__
    config = Extended(fake_level=2)
    assert config._fake_level == 2
    assert read_run_config(config).fake_level == 2
    assert read_session_config(make_session_config(config)) == read_run_config(config)
    assert options_pages.row(FAKE)[:2] == ("`fake_level` `.i`", "an integer in 0..3; `1`")
    with pytest.raises(ValueError, match="fake_level"):
        Extended(fake_level=4)


@pytest.mark.parametrize(
    "option",
    [
        Option(90, "gap", Integer(), "Leaves position 89 out."),
        Option(88, "twice", Integer(), "Takes a position that is taken."),
        Option(89, "jit_compile", Integer(), "Takes a name that is taken."),
        Option(89, "other", Integer(), "Takes a key that is taken.", key="jit_compile"),
    ],
)
def test_table_refuses_contradictions(option):
    with pytest.raises(ValueError, match="options: "):
        OptionTable([*OPTIONS, option])


def test_every_option_has_an_honest_effect_and_a_line():
    for option in OPTIONS:
        assert option.effect.level in ("works", "recorded", "refused")
        assert option.doc.endswith(".")
        assert option.status in ("documented", "deprecated", "undocumented", "unsupported")
        assert option.expected


def test_documentation_pages_equal_the_table():
    docs = Path(__file__).parents[2] / "docs"
    pages = options_pages.render()
    assert {path.name for path in docs.glob("options*.md")} == set(pages)
    changed = [name for name, text in pages.items() if (docs / name).read_text(encoding="utf-8") != text]
    assert changed == [], "run python tools/options_pages.py docs/options.md"


def test_pages_have_a_row_for_every_option():
    lines = "\n".join(options_pages.render().values()).splitlines()
    rows = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert sorted(rows) == sorted([option.name for option in OPTIONS] + [variable.name for variable in VARIABLES])
