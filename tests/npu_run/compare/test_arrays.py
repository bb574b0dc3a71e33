"""Arrays in files are compared piece by piece, and give what numpy gives for all of them at once."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from npu_run.compare import arrays
from npu_run.compare.arrays import compare_arrays, open_npy
from npu_run.compare.verdict import NotComparableError


def saved(path, values, dtype=None):
    np.save(path, values)
    return open_npy(str(path), dtype)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(arrays, "_PIECE", 100)


def test_numbers_are_those_of_numpy(tmp_path):
    random = np.random.RandomState(1)
    a = random.randn(7, 50).astype(np.float32)
    b = (a * 1.001 + 1e-5 * random.randn(7, 50)).astype(np.float32)
    found = compare_arrays(saved(tmp_path / "a.npy", a), saved(tmp_path / "b.npy", b))
    x, y = a.astype(float).ravel(), b.astype(float).ravel()
    relative = abs(y - x) / np.maximum(abs(x), np.sqrt(np.mean(x**2)))
    assert found.cosine == pytest.approx(x @ y / np.sqrt((x @ x) * (y @ y)))
    assert found.gain == pytest.approx(x @ y / (x @ x)) and found.largest_error == pytest.approx(abs(y - x).max())
    assert found.mean_error == pytest.approx(abs(y - x).mean()) and found.elements == 350
    assert found.largest_relative == pytest.approx(relative.max())
    assert found.mismatches == pytest.approx(np.mean(relative > 1e-4)) and not found.is_inside


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4", "int32", "bool", "complex64"])
def test_every_dtype_is_equal_to_itself(tmp_path, dtype):
    values = (np.arange(330).reshape(11, 30) % 7).astype(dtype)
    found = compare_arrays(saved(tmp_path / "a.npy", values), saved(tmp_path / "b.npy", np.asfortranarray(values)))
    assert found.is_inside and found.largest_error == 0 and found.cosine == pytest.approx(1)


def test_a_tolerance_belongs_to_the_dtype_of_a(tmp_path):
    values = 1 + np.arange(200, dtype=np.float32) / 7
    other = saved(tmp_path / "b.npy", values * 1.003)
    inside = {
        dtype: compare_arrays(saved(tmp_path / "a.npy", values, dtype), other).is_inside
        for dtype in ("float32", "float16", "bfloat16")
    }
    assert inside == {"float32": False, "float16": True, "bfloat16": True}
    assert compare_arrays(saved(tmp_path / "a.npy", values), other, tolerance=0.01).is_inside


@pytest.mark.parametrize("dtype, more", [("float32", 100), ("float32", np.nan), ("int64", 1)])
def test_one_element_far_away_is_enough(tmp_path, dtype, more):
    values = (np.random.RandomState(2).randn(5000) * 100).astype(dtype)
    broken = values.copy()
    broken[4321] += more
    assert not compare_arrays(saved(tmp_path / "a.npy", values), saved(tmp_path / "b.npy", broken)).is_inside


def test_nan_and_infinity_are_counted_and_equal_to_themselves(tmp_path):
    values = np.ones(300, np.float32)
    values[[5, 6]] = np.nan, np.inf
    same = compare_arrays(saved(tmp_path / "a.npy", values), saved(tmp_path / "b.npy", values))
    assert same.is_inside and same.not_finite == (2, 2, 0)
    other = values.copy()
    other[[6, 250]] = -np.inf, np.nan
    found = compare_arrays(saved(tmp_path / "a.npy", values), saved(tmp_path / "b.npy", other))
    assert not found.is_inside and found.not_finite == (2, 3, 2)


def test_empty_and_scalar_arrays(tmp_path):
    empty = saved(tmp_path / "a.npy", np.zeros([0, 3], np.float32))
    assert compare_arrays(empty, empty).is_inside
    one, other = saved(tmp_path / "b.npy", np.float32(2)), saved(tmp_path / "c.npy", np.float32(2.1))
    assert not compare_arrays(one, other).is_inside and compare_arrays(one, one).is_inside


@pytest.mark.parametrize(
    "values, length, said",
    [
        (np.ones(100, np.float32), 0, "is not an array of numpy: "),
        (np.ones(100, np.float32), 40, "is not an array of numpy: "),  # in its header
        (np.ones(100, np.float32), 478, r"is truncated: by its header it needs 528 bytes, but it has 478\.$"),
        (np.array([{}], object), None, "holds object instead of numbers"),
    ],
    ids=["empty", "in its header", "cut off", "object"],
)
def test_damaged_files_are_one_sentence(tmp_path, values, length, said):
    path = tmp_path / "a.npy"
    np.save(path, values)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(NotComparableError, match=said) as caught:
        open_npy(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.slow("large files")
def test_files_larger_than_the_memory_are_compared():
    """Half a gigabyte in files without content; the process may grow by a fifth of that."""
    code = """
import os, resource, sys, tempfile
import numpy as np
from npu_run.compare.arrays import compare_arrays, open_npy
with tempfile.TemporaryDirectory() as folder:
    for name in "ab":
        with open(f"{folder}/{name}.npy", "wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 26,)})
            file.truncate(file.tell() + (1 << 28))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = compare_arrays(open_npy(f"{folder}/a.npy"), open_npy(f"{folder}/b.npy"))
    assert found.is_inside and found.elements == 1 << 26
    assert "tensorflow" not in sys.modules
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100_000, "kilobytes"
