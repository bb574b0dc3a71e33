from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_session import decorate_sessions
from tests.options.conftest import quiet_environment  # noqa: F401 - the same quiet for sessions


@pytest.fixture(autouse=True)
def sessions_that_read_options():
    """Undoes the effects of importing npu_init."""
    classes = (tf.compat.v1.Session, tf.compat.v1.InteractiveSession)
    before = [session_class.__init__ for session_class in classes]
    decorate_sessions()
    yield
    for session_class, constructor in zip(classes, before):
        session_class.__init__ = constructor
