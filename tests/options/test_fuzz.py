"""Any value for any option: it is taken, or it is a TypeError or ValueError that names the option."""

from __future__ import annotations

import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from npu_bridge.estimator.npu import npu_config
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.options import OPTIONS, make_session_config, read_run_config, read_session_config
from npu_bridge.options.table import RUN_CONFIG
from tests.options.conftest import slots

_TEXTS = [str(choice) for option in OPTIONS for choice in getattr(option.kind, "choices", ())]
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.integers(-2, 5),
    st.floats(),
    st.text(max_size=8),
    st.just("\ud800"),
    st.binary(max_size=8),
    st.sampled_from(_TEXTS),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
    st.complex_numbers(),
    st.builds(object),
)
_CALLS = st.dictionaries(st.sampled_from([o.name for o in OPTIONS.options_of(RUN_CONFIG)]), _VALUES, max_size=3)
_FUZZ = settings(
    max_examples=250,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _names_one_of(error, names):
    return any(name in str(error) for name in names)


def test_run_config_takes_it_or_names_it():
    @seed(1)
    @_FUZZ
    @given(_CALLS)
    def check(arguments):
        session_config = tf.compat.v1.ConfigProto()
        before = session_config.SerializeToString()
        try:
            config = NPURunConfig(**{"session_config": session_config, **arguments})
        except (TypeError, ValueError) as error:
            assert _names_one_of(error, arguments), (arguments, error)
        else:
            options = read_run_config(config)
            again = read_session_config(make_session_config(config))
            differing = [o.name for o in OPTIONS if o.key and options.get(o.name) != again.get(o.name)]
            assert not differing, (arguments, differing)
        assert session_config.SerializeToString() == before

    check()


@pytest.mark.few_fast(1, "other kinds of values")
@pytest.mark.parametrize(
    "owner", ["ProfilingConfig", "DumpConfig", "MemoryConfig", "DynamicInputConfig", "ExperimentalConfig"]
)
def test_helper_takes_it_or_names_it(owner):
    names = [option.name for option in OPTIONS.options_of(owner)]

    @seed(5)
    @_FUZZ
    @given(st.fixed_dictionaries({}, optional=dict.fromkeys(names, _VALUES)))
    def check(arguments):
        try:
            getattr(npu_config, owner)(**arguments)
        except (TypeError, ValueError) as error:
            assert owner in str(error) and _names_one_of(error, names), (arguments, error)

    check()


_SLOTS = st.one_of(
    st.tuples(st.just("s"), st.one_of(st.binary(max_size=8), st.sampled_from([t.encode() for t in _TEXTS]))),
    st.tuples(st.just("i"), st.integers(-3, 5)),
    st.tuples(st.just("i"), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just("b"), st.booleans()),
    st.tuples(st.just("f"), st.floats(width=32)),
)


def test_session_takes_it_or_names_the_key():
    keys = [option.key for option in OPTIONS if option.key]

    @seed(6)
    @_FUZZ
    @given(st.dictionaries(st.sampled_from([*keys, "unheard_of"]), _SLOTS, max_size=3))
    def check(entries):
        config = slots(*((key, *in_slot) for key, in_slot in entries.items()))
        before = config.SerializeToString(deterministic=True)
        try:
            read_session_config(config)
        except ValueError as error:
            assert _names_one_of(error, entries) or "dump_path" in str(error), (entries, error)
        assert config.SerializeToString(deterministic=True) == before

    check()
