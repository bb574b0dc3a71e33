"""The command line of npu-run: what it passes on, what it refuses, and one rank as a plain process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from npu_run import cli
from npu_run.command_line import Command, add_json_option, add_launcher_options
from npu_run.commands import COMMANDS, GROUPS, find_command
from tests.npu_run.launching import ROOT, needs_horovod, npu_run, write_script

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
    told, _, output = output.partition("\n")
    assert told == "npu-run: -np 7 goes to the script. If it is for npu-run, write npu-run -np 7 train.py"
    assert code == 0
    assert json.loads(output) == [["train.py", *given], *variables.values()]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["train.py", "--json"],
            "check: --json goes to the script. If it is for npu-run check, write npu-run check --",
        ),
        (["train.py", "--tree=a", "--json"], "npu-run check --tree=a train.py"),
        (["train.py", "--own", "--tf1"], "npu-run check --tf1 train.py"),
        (["train.py", "--", "--json"], ""),
        (["-q", "train.py", "--json"], ""),
        (["train.py", "--out", "a"], ""),
        (["train.py", "-h"], ""),
    ],
)
def test_an_option_behind_the_script_is_told_unless_the_script_has_it(tmp_path, monkeypatch, words, told):
    write_script(tmp_path, "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--out')\n")
    monkeypatch.chdir(tmp_path)
    output = CliRunner().invoke(find_command("check"), words).stderr
    assert told in output if told else output == ""


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


def test_files_of_the_current_folder_hide_no_module_that_ranks_need(tmp_path):
    for name in ("random.py", "secrets.py", "npu_bridge/__init__.py"):
        write_script(tmp_path, "raise SystemExit('a file of the current folder')", name)
    write_script(tmp_path, "from neighbour import WORD\nprint(WORD)", "src/train.py")
    write_script(tmp_path, "import random\nWORD = random.__name__", "src/neighbour.py")
    assert npu_run("src/train.py", cwd=tmp_path, prepare=f"import sys; sys.path[0] = {str(ROOT)!r}") == (0, "random\n")


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
        (["--wait", "0", "train.py"], "--wait is only for elastic jobs. Add --min-np N"),
        (["-np", "2", "--cool-down", "60", "train.py"], "--cool-down is only for elastic jobs. Add --min-np N"),
    ],
)
def test_a_job_that_cannot_start_is_refused_in_one_line(tmp_path, monkeypatch, arguments, part):
    write_script(tmp_path, "raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.run_script, arguments)
    assert result.exit_code == 2
    assert part in result.output
    assert len(result.output.splitlines()) == 1


def test_missing_horovod_is_told_in_one_line_with_the_command(tmp_path):
    write_script(tmp_path, "print('ran')")
    write_script(tmp_path, "raise ImportError(\"No module named 'horovod'\")", "horovod/__init__.py")
    code, output = npu_run("-np", "2", "train.py", cwd=tmp_path)
    assert code == 2
    assert len(output.splitlines()) == 1
    assert "HOROVOD_WITH_GLOO=1" in output and "pip install --no-build-isolation horovod==0.28.1" in output


def test_a_file_wins_over_a_sub_command_of_the_same_name(tmp_path, monkeypatch, capsys):
    import click

    @click.command()
    def doctor():
        click.echo("the sub-command")

    monkeypatch.setattr("npu_run.doctor.command.doctor", doctor)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["doctor"])
    assert capsys.readouterr().out == "the sub-command\n"
    write_script(tmp_path, "", name="doctor")
    monkeypatch.setattr(cli, "_run_alone", lambda script, *rest: pytest.exit(script, returncode=0))
    with pytest.raises(pytest.exit.Exception, match="doctor"):
        cli.main(["doctor"])


def test_a_folder_of_its_name_hides_no_sub_command(tmp_path, monkeypatch, capsys):
    stub = click.Command("bisect", callback=lambda: click.echo("the sub-command"))
    monkeypatch.setattr("npu_run.bisect.bisect", stub)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bisect").mkdir()  # where a search that was interrupted resumes
    with pytest.raises(SystemExit):
        cli.main(["bisect"])
    assert capsys.readouterr().out == "the sub-command\n"


def test_a_command_that_is_interrupted_gives_no_answer():
    def wait(as_json):
        raise KeyboardInterrupt

    result = CliRunner().invoke(add_json_option(click.command(cls=Command)(wait)), ["--json"])
    assert result.exit_code == 130 and result.stderr.endswith("wait: stopped by SIGINT\n")
    assert json.loads(result.stdout)["verdict"] == "unknown"


def test_help_and_version():
    lines = CliRunner().invoke(cli.run_script, ["--help"]).output.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 66
    for group, entries in GROUPS.items():
        at = lines.index(f"{group}:")
        assert [line.split()[0] for line in lines[at + 1 : at + 1 + len(entries)]] == list(entries)
    assert any(line.startswith("  -np N ") for line in lines)
    assert CliRunner().invoke(cli.run_script, ["--version"]).output.startswith("npu-run, version ")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["-np", "99999999999"], "too many ranks"),
        (["-np", "0"], "0 is not in the range"),
        (["--stall-secs", "nan"], "expected seconds, 0 for never; got nan"),
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chekc train.py", "there is no command 'chekc' and no such file: did you mean check?"),
        ("-np 2 trian.py", "there is no file 'trian.py' to run: did you mean train.py?"),
        ("sub/trian.py", "there is no file 'sub/trian.py' to run: did you mean sub/train.py?"),
        ("record trian.py", "there is no file 'trian.py' to run: did you mean train.py?"),
        ("-q plan", "A command comes before its options: npu-run plan ..."),
        ("--stal-secs 3 train.py", "--stall-secs"),
        ("bisect --max-run 3 train.py", "--max-runs"),
    ],
)
def test_a_misspelt_word_is_told_the_nearest_one(words, said, tmp_path, monkeypatch, capsys):
    for folder in (tmp_path, tmp_path / "sub"):
        write_script(folder, "raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())
    assert said in capsys.readouterr().err


OWN = {"record": ["--steps", "3"], "replay": ["recorded", "--out", "o"], "bisect": ["--low", "force_fp16"], "check": []}


@pytest.mark.parametrize("name", [*OWN, "npu-run", "effects"])
def test_what_follows_the_script_is_its_own_in_every_command(name, tmp_path):
    script = str(write_script(tmp_path, "parser.add_argument('--steps')"))
    command = find_command(name) if name in COMMANDS else cli.run_script
    for words in (
        ["--batch", "32", "-q"],
        ["data", "--low", "--", "x"],
        ["--steps", "7"],
        ["--", "--tf1"],
        ["--tf1", "-q", "--json"],
        ["--nothing"],
    ):
        context = command.make_context(name, [*OWN.get(name, []), script, *words])
        given = words[1:] if words[0] == "--" else words
        assert (context.params["script"], list(context.params["arguments"])) == (script, given)
        assert context.params["era"] is None if "era" in context.params else True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--vary", "order"], "--vary says how the runs of --repeat differ"),
        (["--repeat", "2", "--timeline", "1:2"], "--timeline records one run"),
        (["--out", "all"], "--out is the folder of --logs, --timeline or --repeat"),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path, options, said):
    write_script(tmp_path, "print('ran')")
    code, output = npu_run(*options, "train.py", cwd=tmp_path)
    assert code == 2 and said in output and os.listdir(tmp_path) == ["train.py"]


@pytest.mark.parametrize("option", ["--tf1", "--tf2", "--as-installed"])
def test_commands_that_start_jobs_pass_the_choice_of_tensorflow_on(tmp_path, option):
    @click.command()
    @add_launcher_options
    def start(launcher, script, arguments):
        click.echo(launcher)

    assert CliRunner().invoke(start, [option, str(write_script(tmp_path, ""))]).output == f"{[option]}\n"


def test_one_folder_takes_all_that_a_job_writes(tmp_path):
    write_script(tmp_path, "print('ran')")
    code, output = npu_run("-q", "--logs", "--repeat", "2", "--out", "all", "train.py", cwd=tmp_path)
    assert code == 0 and output.count("ran") == 2 and "npu-run: repeat" not in output
    assert {path.name for path in (tmp_path / "all").iterdir()} >= {"rank_0.log", "repeat-0", "repeat-1"}


COMPLETED = {  # what was typed: what must be offered, what must not
    "ch": (["check"], ["compare"]),
    "": (["doctor", "bisect", "train.py"], ["--out"]),
    "--re": (["--repeat", "--restarts"], []),
    "check --t": (["--tf1", "--tree"], ["--timeline"]),
    "check tr": (["train.py"], ["tree.txt"]),
    "-np 2 tr": (["train.py"], []),
    "replay a tr": (["train.py"], []),
    "effects ru": (["run.toml"], []),
    "plan --wire ": (["bfloat16"], []),
    "--set precision_m": (["precision_mode=", "precision_mode_v2="], ["train.py"]),
    "try --set save_c": (["save_checkpoints_steps="], ["train.py"]),
    "completion ": (["bash", "zsh", "fish"], []),
    "train.py --": ([], ["--out"]),
    "check train.py --": ([], ["--out"]),
}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_options_and_scripts(shell, tmp_path, monkeypatch, capsysbinary):
    """Asked as the script of `npu-run completion` asks."""
    for name in ("train.py", "tree.txt", "run.toml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["completion", shell])
    assert b"_NPU_RUN_COMPLETE=%s_complete" % shell.encode() in capsysbinary.readouterr().out
    monkeypatch.setenv("_NPU_RUN_COMPLETE", f"{shell}_complete")
    for typed, (offered, others) in COMPLETED.items():
        words = typed.split(" ")
        monkeypatch.setenv("COMP_WORDS", f"npu-run {typed}")
        monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words)))
        with pytest.raises(SystemExit):
            cli.main([])
        found = set(capsysbinary.readouterr().out.decode().replace(",", "\n").split())
        assert found >= set(offered) and not found & set(others), typed


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_itself_completes(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "npu-run").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m npu_bridge.run "$@"\n')
    (tmp_path / "npu-run").chmod(0o755)
    text = """
    eval "$(npu-run completion bash)"
    COMP_WORDS=(npu-run check tr); COMP_CWORD=2; compopt() { :; }
    _npu_run_completion npu-run check npu-run; echo "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "train.py\n", done.stderr
