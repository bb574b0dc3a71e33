"""A part of the matrix of `elastic_matrix.py`: each way to train, a BERT, and Keras 3 where it is."""

from __future__ import annotations

import numpy as np
import pytest

from tests.canaries.of_keras3 import IS_BESIDE, REASON
from tests.npu_run.elastic_matrix import Outcome, check_rows, compare, measure
from tests.npu_run.launching import needs_horovod

needs_keras3 = pytest.mark.skipif(not IS_BESIDE, reason=REASON)


@pytest.mark.slow("each way to train, on ranks that come and go")
@needs_horovod
@pytest.mark.parametrize(
    ("face", "model"),
    [
        ("estimator", "digits"),
        ("session", "bert"),
        ("monitored", "digits"),
        ("keras", "digits"),
        ("loop", "digits"),
        pytest.param("keras3", "digits", marks=needs_keras3),
        pytest.param("loop3", "digits", marks=needs_keras3),
    ],
)
def test_a_job_that_changes_its_size_computes_what_one_rank_does(tmp_path, face, model):
    measure(tmp_path, face, model, seed=1, steps=60)


def test_the_matrix_sees_what_is_wrong():
    rows = np.array([[0, 1, 2], [3, 2, 0], [1, 3, 0]])
    assert check_rows(rows) == 3
    with pytest.raises(AssertionError, match="a row came twice"):
        check_rows(rows[:, ::-1])
    good = Outcome({"kernel": np.array([1.0, 4.0]), "key/bias": np.zeros(2)}, np.array([2.0, 4.0]), rows, (1,))
    assert max(compare(good, good)) == 0.0
    weights = {"kernel": np.array([1.0, 4.4]), "key/bias": np.ones(2)}
    worst = compare(good._replace(weights=weights, losses=np.array([2.0, 5.0])), good)
    assert worst == pytest.approx((0.25, 0.1))
    with pytest.raises(AssertionError):
        compare(good._replace(rows=rows[::-1]), good)
