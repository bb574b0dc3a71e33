"""The command line of npu-run: what it passes on, what it refuses, and one rank as a plain process."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from npu_bridge.launch import cli
from tests.launch.launching import needs_horovod, npu_run, write_script

SHOW_ARGUMENTS = """
    import json, os, sys
    if os.environ["RANK_ID"] == "0":
        names = ("DEVICE_ID", "OMP_NUM_THREADS", "TF_CPP_MIN_LOG_LEVEL")
        print(json.dumps([sys.argv, *(os.environ.get(name) for name in names)]))
"""


@pytest.mark.parametrize("options", [[], pytest.param(["-np", "2"], marks=needs_horovod)])
def test_arguments_of_the_script_and_variables_of_the_caller_pass_through_untouched(tmp_path, options):
    write_script(tmp_path, SHOW_ARGUMENTS)
    given = ["--flag", "-np", "7", "--", "-H", "--help", "a b", "$HOME", "'", ""]
    variables = {"DEVICE_ID": "5", "OMP_NUM_THREADS": "3", "TF_CPP_MIN_LOG_LEVEL": "0"}
    code, output = npu_run(*options, "train.py", *given, cwd=tmp_path, **variables)
    assert code == 0
    assert json.loads(output) == [["train.py", *given], *variables.values()]


def test_one_rank_runs_without_horovod_and_as_python_would_run_it(tmp_path):
    write_script(tmp_path, "WORD = 'helper'", name="helper.py")
    write_script(
        tmp_path,
        """
        import os, pickle, sys
        import helper
        class Thing: pass
        assert pickle.loads(pickle.dumps(Thing())).__class__ is Thing
        assert __name__ == "__main__" and os.path.isabs(__file__) and __spec__ is None
        assert sys.path[0] == os.path.dirname(__file__)
        assert "horovod" not in sys.modules and "tensorflow" not in sys.modules
        print(helper.WORD, os.environ["RANK_ID"], os.environ["RANK_SIZE"], os.environ["DEVICE_ID"])
        sys.exit(5)
        """,
    )
    code, output = npu_run(tmp_path / "train.py", cwd=tmp_path.parent)
    assert (code, output) == (5, "helper 0 1 0\n")


def test_one_rank_shows_only_the_scripts_own_frames(tmp_path):
    write_script(tmp_path, "def f():\n    raise ValueError('boom')\nf()\n")
    code, output = npu_run("train.py", cwd=tmp_path)
    assert code == 1
    assert output.startswith("Traceback (most recent call last):") and output.endswith("ValueError: boom\n")
    assert "launch" not in output


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["missing.py"], "there is no file 'missing.py'"),
        (["-np", "2", "python", "train.py"], "npu-run -np 2 train.py"),
        (["-H", "one:2,two", "train.py"], "got 'one:2,two'"),
        (["-H", "one:2,one:2", "train.py"], "names a host twice"),
        (["-np", "5", "-H", "one:2,two:2", "train.py"], "-np 5 is more than -H one:2,two:2 offers"),
    ],
)
def test_a_job_that_cannot_start_is_refused_in_one_line(tmp_path, monkeypatch, arguments, part):
    write_script(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.run_script, arguments)
    assert result.exit_code == 2
    assert part in result.output
    assert len(result.output.splitlines()) == 1


def test_number_of_ranks_must_be_positive(tmp_path):
    result = CliRunner().invoke(cli.run_script, ["-np", "0", "train.py"])
    assert result.exit_code == 2
    assert "0" in result.output


def test_missing_horovod_is_told_in_one_line_with_the_command(tmp_path):
    write_script(tmp_path, "print('ran')")
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError(\"No module named 'horovod'\")")
    code, output = npu_run("-np", "2", "train.py", cwd=tmp_path)
    assert code == 2
    assert len(output.splitlines()) == 1
    assert "HOROVOD_WITH_GLOO=1" in output and "pip install --no-build-isolation horovod==0.28.1" in output


def test_a_file_wins_over_a_sub_command_of_the_same_name(tmp_path, monkeypatch, capsys):
    import click

    @click.command()
    def doctor():
        click.echo("the sub-command")

    monkeypatch.setattr("npu_bridge.launch.doctor.command.doctor", doctor)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["doctor"])
    assert capsys.readouterr().out == "the sub-command\n"
    write_script(tmp_path, "", name="doctor")
    monkeypatch.setattr(cli, "_run_alone", lambda script, *rest: pytest.exit(script, returncode=0))
    with pytest.raises(pytest.exit.Exception, match="doctor"):
        cli.main(["doctor"])


def test_help_and_version():
    assert "-np" in CliRunner().invoke(cli.run_script, ["--help"]).output
    assert CliRunner().invoke(cli.run_script, ["--version"]).output.startswith("npu-run, version ")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["-np", "99999999999"], "too many ranks"),
        (["--stall-secs", "nan"], "expected seconds, 0 for never; got nan"),
        (["--stall-secs", "inf"], "expected seconds, 0 for never; got inf"),
        (["--stall-secs", "-1"], "-1"),
        (["--timeline", f"0:{'9' * 5000}"], "--timeline is not a range of steps"),
        (["-H", "-oProxyCommand=x:1"], "begins with a dash"),
    ],
)
def test_values_that_nobody_can_mean_are_refused(tmp_path, options, part):
    script = write_script(tmp_path, "raise SystemExit(9)")
    result = CliRunner().invoke(cli.run_script, [*options, str(script)])
    assert result.exit_code == 2
    assert part in result.output and len(result.output) < 600
