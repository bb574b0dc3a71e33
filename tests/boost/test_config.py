"""The dictionary of a boosted training: every default, level and mode of its schema, and what is refused."""

from __future__ import annotations

import json

import pytest

from npu_bridge import boost
from npu_bridge.boost.config import BoostConfig
from tests.refusing import refuses

# The schema as it is documented: section, key, default, a legal value, illegal ones.
SCHEMA = [
    ("boost", "mode", "auto", "manual", ["on", None]),
    ("boost", "less_bn", False, True, [1, "true"]),
    ("boost", "grad_freeze", False, True, [0]),
    ("boost", "adasum", False, True, ["yes"]),
    ("boost", "grad_accumulation", False, True, [2]),
    ("boost", "dim_reduce", False, True, [None]),
    ("boost", "loss_scale_group", False, True, [[]]),
    ("common", "gradient_split_groups", None, [50, 100], [[], [0, 5], [5, 5], [1.5], 50, "50"]),
    ("common", "device_number", 8, 4, [0, 8.0, True]),
    ("less_bn", "fn_flag", True, False, ["no"]),
    ("less_bn", "gc_flag", True, False, [None]),
    ("grad_freeze", "param_groups", 10, 3, [0, 2.0]),
    ("grad_freeze", "freeze_type", 1, 0, [2, True, "interval"]),
    ("grad_freeze", "freeze_p", 0.7, 1, [0, 1.1, "0.7"]),
    ("grad_freeze", "total_steps", 65536, 10, [0, 1e3]),
    ("grad_accumulation", "grad_accumulation_step", 1, 4, [0, 2.0]),
    ("dim_reduce", "rho", 0.55, 0.5, [0, 1]),
    ("dim_reduce", "gamma", 0.9, 0, [1, -0.1]),
    ("dim_reduce", "alpha", 0.001, 0, [-1]),
    ("dim_reduce", "sigma", 0.4, 0.1, [1.0]),
    ("dim_reduce", "n_components", 32, 1, [0]),
    ("dim_reduce", "pca_mat_path", None, "basis.npy", [3]),
    ("dim_reduce", "weight_load_dir", None, "checkpoints", [3]),
    ("dim_reduce", "timeout", 1800, 1, [0]),
]
FLAGS = ["less_bn", "grad_freeze", "adasum", "grad_accumulation", "dim_reduce", "loss_scale_group"]
CHOSEN = {"O0": set(), "O1": {"less_bn", "grad_freeze"}, "O2": {"less_bn", "grad_freeze", "adasum"}}


def test_the_schema_is_the_documented_one():
    config = BoostConfig.from_dict()
    documented = [(section, key) for section, key, *_ in SCHEMA]
    assert documented == [(section, key) for section in config.values for key in config[section]]


@pytest.mark.parametrize("section, key, default, legal, illegal", SCHEMA, ids=[f"{row[0]}.{row[1]}" for row in SCHEMA])
def test_each_key_has_its_default_and_takes_legal_values_only(section, key, default, legal, illegal):
    assert BoostConfig.from_dict({})[section][key] == default
    read = BoostConfig.from_dict({section: {key: legal}})
    assert read[section][key] == (tuple(legal) if isinstance(legal, list) else legal)
    others = BoostConfig.from_dict()
    for other in others.values:
        for name, value in others[other].items():
            assert (other, name) == (section, key) or read[other][name] == value
    for value in illegal:
        with pytest.raises((TypeError, ValueError), match=rf"{section}\.{key} is wrong. Expected .*got "):
            BoostConfig.from_dict({section: {key: value}})


@pytest.mark.parametrize("level", CHOSEN)
@pytest.mark.parametrize("mode", ["auto", "manual", "enable_all", "disable_all"])
@pytest.mark.parametrize("flag", FLAGS)
def test_each_feature_in_each_mode_at_each_level(level, mode, flag):
    chosen = BoostConfig.from_dict({"boost": {"mode": mode, flag: True}}).chosen_features(level)
    expected = {"auto": CHOSEN[level], "manual": {flag}, "enable_all": set(FLAGS), "disable_all": set()}[mode]
    assert set(chosen) == (expected if level != "O0" else set())


def test_levels_and_presets_are_not_mutated_by_a_configuration():
    """In the mode "manual" a later configuration once found what an earlier one had left behind."""
    given = {"boost": {"mode": "manual", "adasum": True}, "common": {"gradient_split_groups": [5, 9]}}
    config = BoostConfig.from_dict(given)
    assert config.chosen_features("O1") == ("adasum",)
    given["common"]["gradient_split_groups"].append(3)
    given["boost"]["adasum"] = False
    assert config["common"]["gradient_split_groups"] == (5, 9) and config["boost"]["adasum"]
    assert BoostConfig.from_dict().chosen_features("O1") == ("less_bn", "grad_freeze")
    assert {level: set(chosen) for level, chosen in boost.LEVELS.items()} == CHOSEN
    for mapping in (config["boost"], config.values, boost.LEVELS):
        with pytest.raises(AttributeError):
            mapping.update(adasum=False)


@refuses(
    ({"bost": {}}, ValueError, ["unknown section, 'bost'", "Did you mean 'boost'?"]),
    ({"boost": {"grad_freez": True}}, ValueError, ["unknown key of boost", "Did you mean 'grad_freeze'?"]),
    ({"common": {"freeze_p": 0.5}}, ValueError, ["'common.freeze_p'", "Did you mean 'grad_freeze.freeze_p'?"]),
    ({"less_bn": {"whatever": 1}}, ValueError, "one of fn_flag, gc_flag; got 'whatever' (str). Remove it"),
    ({"boost": True}, TypeError, "section boost is not a mapping"),
    ([], TypeError, "the configuration is not a mapping"),
)
def test_unknown_keys_are_not_silent(config):
    BoostConfig.from_dict(config)


def test_unknown_levels_are_refused():
    with pytest.raises(ValueError, match=r"one of O0, O1, O2; got 'o1' \(str\). Did you mean 'O1'\?"):
        BoostConfig.from_dict().chosen_features("o1")


def test_files_are_read_as_dictionaries_are(tmp_path):
    given = {"boost": {"mode": "manual", "grad_freeze": True}, "grad_freeze": {"freeze_p": 0.5, "param_groups": 3}}
    (tmp_path / "boost.json").write_text(json.dumps(given))
    (tmp_path / "boost.toml").write_text(
        '[boost]\nmode = "manual"\ngrad_freeze = true\n[grad_freeze]\nfreeze_p = 0.5\nparam_groups = 3\n'
    )
    expected = BoostConfig.from_dict(given)
    for read in (
        BoostConfig.from_json(tmp_path / "boost.json"),
        BoostConfig.from_json(json.dumps(given)),
        BoostConfig.from_toml(tmp_path / "boost.toml"),
    ):
        assert read == expected and read.chosen_features() == ("grad_freeze",)
    (tmp_path / "wrong.toml").write_text("[boost]\nlevel = 1\n")
    with pytest.raises(ValueError, match=r"wrong.toml: BoostConfig: unknown key of boost"):
        BoostConfig.from_toml(tmp_path / "wrong.toml")
    (tmp_path / "wrong.json").write_text("{")
    with pytest.raises(ValueError, match=r"wrong.json:1: BoostConfig: it is not JSON"):
        BoostConfig.from_json(tmp_path / "wrong.json")
