"""A warm start for the commands that run scripts as trials."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from npu_run import bisect, record
from tests.npu_run.trials.running import WarmTrials


@pytest.fixture
def trials(warm_python, tmp_path, monkeypatch):
    """Runs trials from a warm Python, in the test's folder; commands of `npu-run` do so, too."""
    warm = WarmTrials(warm_python, tmp_path)
    monkeypatch.chdir(tmp_path)
    for module in (bisect, record):
        monkeypatch.setattr(module, "run_trial", warm.run)
    return warm


@pytest.fixture
def command(trials):
    """Runs a command of `npu-run`: gives exit code and all it prints."""

    def run(function, *arguments):
        ended = CliRunner().invoke(function, [str(each) for each in arguments])
        if ended.exception is not None and not isinstance(ended.exception, SystemExit):
            raise ended.exception
        return ended.exit_code, ended.output

    return run
