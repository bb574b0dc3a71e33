"""An Estimator and a session come to the same options, for every option that works here."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import npu_config
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_helpers import npu_config_proto
from npu_bridge.options import OPTIONS, of_graph, read_run_config, read_session_config
from npu_bridge.options.table import RUN_CONFIG, SESSION
from tests.documented.helper_config_facts import HELPER_VALUES
from tests.documented.run_config_facts import NEEDS, RUN_CONFIG_VALUES
from tests.session.models import model_fn

tf1 = tf.compat.v1


def _cases():
    for option in OPTIONS:
        if option.effect.level != "works" or not option.key or option.owner == SESSION:
            continue
        if option.owner == RUN_CONFIG:
            legal, others = RUN_CONFIG_VALUES[option.name][0], NEEDS.get(option.name, {})
        else:
            legal, _, others = HELPER_VALUES[option.owner][option.name]
        for value in legal:
            if value is not None:
                yield option.name, value, others


def _at(folder, values):
    return {name: str(folder) if value == "{directory}" else value for name, value in values.items()}


def _run_config(owner, values, folder):
    if owner != RUN_CONFIG:
        parameter = next(o.name for o in OPTIONS.options_of(RUN_CONFIG) if getattr(o.kind, "owner", None) == owner)
        values = {parameter: getattr(npu_config, owner)(**values)}
    return NPURunConfig(model_dir=str(folder / "model"), **values)


def _session_config(values):
    """Returns a script's settings: a normalised proto, and one key after the other."""
    config = npu_config_proto()
    (entry,) = config.graph_options.rewrite_options.custom_optimizers
    for name, value in values.items():
        option = OPTIONS[name]
        slot = option.kind.session_field
        value = value.encode() if isinstance(value, str) else value
        setattr(entry.parameter_map[option.key], slot, bool(value) if slot == "b" else value)
    return config


def _said(options, silent):
    """Returns the differences of options from those of an empty configuration, without values a session cannot set."""
    return {name: value for name, value in options.items() if OPTIONS[name].key and value != silent[name]}


def test_there_are_cases_for_every_working_option():
    names = {name for name, *_ in _cases()}
    assert {"deterministic", "dump_step", "enable_dump_debug", "enable_profiling", "hcom_parallel"} <= names
    assert {"session_device_id", "local_device_list", "variable_placement", "oo_constant_folding"} <= names


@pytest.mark.parametrize("name, value, others", list(_cases()))
def test_estimator_and_session_agree(name, value, others, tmp_path, monkeypatch):
    values = _at(tmp_path, {**others, name: value})
    monkeypatch.chdir(tmp_path)  # where the files are that these two options name
    Path("mixlist.json").write_text("{}")
    Path("dtypes.cfg").write_text("")
    estimator = NPUEstimator(model_fn, config=_run_config(OPTIONS[name].owner, values, tmp_path))
    with tf.Graph().as_default(), tf1.Session(config=_session_config(values)):
        of_session = of_graph.options_of_current_graph()
    if of_session is None:
        assert name == "use_off_line"
        return
    said = _said(estimator._options, read_run_config(NPURunConfig()))
    assert said == _said(of_session, read_session_config(npu_config_proto()))
    assert name in said or value == OPTIONS[name].default or OPTIONS[name].normalise(value) == OPTIONS[name].absent
