"""`npu-run --set NAME=VALUE` changes an option of the NPURunConfig that a script makes."""

from __future__ import annotations

import pytest

from npu_bridge.base import environment
from npu_bridge.estimator.npu.npu_config import DumpConfig, NPURunConfig
from npu_bridge.options import from_shell


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (environment.SETTINGS, environment.SETTINGS_READ):
        monkeypatch.setenv(name, "")


def test_values_win_over_the_script_and_are_told_with_the_line(tmp_path, capsys):
    from_shell.pass_settings_to_ranks(["save_checkpoints_steps=7", "dump_config.dump_mode=all", "tf_random_seed = 3"])
    config = NPURunConfig(save_checkpoints_steps=5, dump_config=DumpConfig(dump_path=str(tmp_path)))
    assert (config._save_checkpoints_steps, config._tf_random_seed) == (7, 3)
    assert (config._dump_config._dump_mode, config._dump_config._dump_path) == ("all", str(tmp_path))
    assert "takes --set save_checkpoints_steps=7 --set dump_config.dump_mode=all" in (said := capsys.readouterr().err)
    assert f"npu-run: the NPURunConfig of {__file__}:" in said and said.count("\n") == 1
    assert NPURunConfig()._dump_config._dump_mode == "all"
    path = tmp_path / "run.toml"
    path.write_text("save_checkpoints_steps = 9")
    assert NPURunConfig.from_file(path)._save_checkpoints_steps == 7
    from_shell.report_unread_settings()
    assert "changed nothing" not in capsys.readouterr().err


def test_texts_need_no_quotes_and_the_last_of_two_counts():
    for text in ("'origin'", '"origin"', "origin", " origin "):
        from_shell.pass_settings_to_ranks([f"precision_mode_v2={text}"])
        assert NPURunConfig()._precision_mode_v2 == "origin"
    from_shell.pass_settings_to_ranks(
        ["hcom_parallel=False", "horovod_mode=true", "tf_random_seed=1", "tf_random_seed=2", "model_dir=2026-12-01"]
        + ["dump_config.dump_step=3", "jit_compile=true", 'profiling_config.profiling_options={"output": "prof"}']
    )
    config = NPURunConfig()
    assert (config._hcom_parallel, config.horovod_mode, config._tf_random_seed) == (False, True, 2)


@pytest.mark.parametrize(
    "word, error, said",
    [
        (
            "save_checkpoints_stepz=1",
            ValueError,
            "--set save_checkpoints_stepz=1: .*Did you mean 'save_checkpoints_ste",
        ),
        ("save_checkpoints_steps=x", TypeError, "--set save_checkpoints_steps=x: .*got 'x' .str.. Pass a number"),
        ("enable_dump=true", ValueError, "--set enable_dump=true: .*It belongs to DumpConfig"),
        ("dump_config=1", ValueError, "--set dump_config=1: .*Write a table"),
        ("dump_config.enable_dump=5", ValueError, "--set dump_config.enable_dump=5: .*True or False"),
        ("session_config=x", ValueError, "--set session_config=x: key session_config: a file cannot hold"),
        ("tf_random_seed=None", ValueError, "--set tf_random_seed=None: None cannot be set here"),
        ("tf_random_seed=", ValueError, "--set tf_random_seed=:1: .*not TOML"),
        ("precision_mode='x", ValueError, "--set precision_mode='x:1: .*not TOML"),
        ("tf_random_seed", ValueError, "Expected NAME=VALUE"),
        ("=3", ValueError, "Expected NAME=VALUE"),
        ("a\nb=3", ValueError, "Expected NAME=VALUE"),
        ("model_dir=" + "x" * 5000, ValueError, "Expected NAME=VALUE"),
    ],
)
def test_what_is_wrong_by_itself_is_told_before_anything_starts(word, error, said):
    with pytest.raises(error, match=said) as caught:
        from_shell.pass_settings_to_ranks(["tf_random_seed=1", word])
    assert str(caught.value).count("--set") == 1 + ("such as" in str(caught.value)) and len(str(caught.value)) < 500
    assert environment.launcher_settings() == []


def test_what_does_not_go_with_the_script_names_the_option_that_was_set(tmp_path):
    from_shell.pass_settings_to_ranks(["iterations_per_loop=3"])
    with pytest.raises(ValueError, match="^--set iterations_per_loop=3: NPURunConfig: iterations_per_loop does not go"):
        NPURunConfig(mix_compile_mode=True)
    with pytest.raises(ValueError, match="^NPURunConfig: horovod_mode"):
        NPURunConfig(horovod_mode=5)
    from_shell.pass_settings_to_ranks(["dump_config.enable_dump=true"])
    with pytest.raises(ValueError, match="^--set dump_config.enable_dump=true: DumpConfig: dump_path is missing"):
        NPURunConfig()


def test_settings_that_nobody_read_are_told_at_the_end(capsys, monkeypatch):
    from_shell.pass_settings_to_ranks(["tf_random_seed=1"])
    monkeypatch.setenv("RANK_ID", "1")
    from_shell.report_unread_settings()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK_ID", "0")
    from_shell.report_unread_settings()
    said = capsys.readouterr().err
    assert "--set tf_random_seed=1 changed nothing: the script has made no NPURunConfig" in said
    assert said.rstrip().endswith("Make one, or set the option where the script sets its options.")
