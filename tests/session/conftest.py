from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_session import decorate_sessions
from npu_bridge.options import environment, environment_table
from npu_bridge.options.errors import say_once


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    """No variable of a launcher or of the documentation is set, and nothing has been said yet."""
    for variable in environment_table.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    for names in environment._LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    say_once.cache_clear()


@pytest.fixture(autouse=True)
def sessions_that_read_options():
    """What importing npu_init does, undone again."""
    classes = (tf.compat.v1.Session, tf.compat.v1.InteractiveSession)
    before = [session_class.__init__ for session_class in classes]
    decorate_sessions()
    yield
    for session_class, constructor in zip(classes, before):
        session_class.__init__ = constructor
