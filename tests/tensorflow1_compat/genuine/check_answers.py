"""The answers that tests compare with are those of the genuine TensorFlow 1.15: `make test-tf115` runs this.

It is no part of the suite: one answer, once in many runs, is another one there.
"""

from __future__ import annotations

import pytest

from tests.tensorflow1_compat.genuine.compare import differences
from tests.tensorflow1_compat.test_genuine import ANSWERS, REPOSITORY, run

PYTHON_OF_1_15 = REPOSITORY / ".venv-tf115/bin/python"


@pytest.mark.skipif(not PYTHON_OF_1_15.exists(), reason="no TensorFlow 1.15; `make venv-tf115` needs Python 3.7")
def test_the_answers_are_those_of_the_genuine_one(tmp_path):
    again = run(tmp_path / "again.npz", str(PYTHON_OF_1_15))
    assert again["names"] == ANSWERS["names"]
    for key, case in ANSWERS["cases"].items():
        assert differences(case, again["cases"][key])[0] == [], key
