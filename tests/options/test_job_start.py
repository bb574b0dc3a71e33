"""Where a job starts, as its file or the environment says."""

from __future__ import annotations

import json

import pytest

from npu_bridge.options import JobStart, read_job_start

WHOLE = {
    "device_info": {"Index": 0},
    "rank_table_file": "rank_table.json",
    "rank_size": 2,
    "local_checkpoint_dir": "of_the_file",
}


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "job.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.mark.parametrize("nothing", [None, ""])
def test_nothing_says_anything(nothing, monkeypatch):
    assert read_job_start(nothing).restore_from is None
    monkeypatch.setenv("RESTORE_FROM", "")
    assert read_job_start(nothing).restore_from is None, "an empty variable counts as unset"


def test_the_file_comes_first_then_its_variable_then_the_last_resort(written, monkeypatch):
    monkeypatch.setenv("RESTORE_FROM", "last_resort")
    assert read_job_start() == JobStart("last_resort", "RESTORE_FROM", None)
    monkeypatch.setenv("LOCAL_CHECKPOINT_DIR", "of_the_environment")
    assert read_job_start() == JobStart("of_the_environment", "LOCAL_CHECKPOINT_DIR", None)
    path = written(WHOLE)
    assert read_job_start(path) == JobStart("of_the_file", f"local_checkpoint_dir of {path}", 2)
    without = {name: value for name, value in WHOLE.items() if name != "local_checkpoint_dir"}
    # A file that can be read is instead of the variable.
    for named in (without, {**WHOLE, "local_checkpoint_dir": ""}):
        assert read_job_start(str(written(named))) == JobStart("last_resort", "RESTORE_FROM", 2)


def test_a_file_that_cannot_be_read_leaves_it_to_the_environment(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("LOCAL_CHECKPOINT_DIR", "of_the_environment")
    assert read_job_start(tmp_path / "none.json") == JobStart("of_the_environment", "LOCAL_CHECKPOINT_DIR", None)
    assert "none.json: it cannot be read. Expected a JSON file; got" in caplog.text


@pytest.mark.parametrize(
    "change, error, word",
    [
        ({"device_info": None}, ValueError, "device_info is missing"),
        ({"device_info": {}}, ValueError, "Index is missing"),
        ({"device_info": {"Index": -1}}, ValueError, "Index is out of range"),
        ({"device_info": {"Index": "0"}}, TypeError, "Index is not an integer"),
        ({"rank_table_file": None}, ValueError, "rank_table_file is missing"),
        ({"rank_size": None}, ValueError, "rank_size is missing"),
        ({"rank_size": 0}, ValueError, "rank_size is out of range"),
        ({"rank_size": 2.0}, TypeError, "rank_size is not an integer"),
        ({"local_checkpoint_dir": 1}, TypeError, "local_checkpoint_dir is not a path"),
    ],
)
def test_illegal_fields(written, change, error, word):
    path = written({**WHOLE, **change})
    with pytest.raises(error, match=rf"job start file {path}.*{word}\. Expected .* got "):
        read_job_start(path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_what_is_no_json_object(written, content):
    with pytest.raises(ValueError, match=r"job start file .*Expected .* got "):
        read_job_start(written(content))
