from __future__ import annotations

import pytest

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.options import read_run_config
from tests.refusing import refuses


def _load(tmp_path, text, **overrides):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return NPURunConfig.from_file(path, **overrides)


def test_file_gives_the_same_as_code(tmp_path):
    config = _load(
        tmp_path,
        """
        save_checkpoints_steps = 500  # often enough
        precision_mode_v2 = "origin"

        [memory_config]
        static_memory_policy = 2

        [experimental_config]
        accelerate_train_mode = "fast|step|0.5"

        [experimental_config.graph_memory_optimize_config]
        graph_slice = "auto"
        """,
    )
    options = read_run_config(config)
    assert (options.save_checkpoints_steps, options.precision_mode_v2) == (500, "origin")
    assert (options.static_memory_policy, options.graph_slice) == (2, "auto")
    assert options.accelerate_train_mode == "fast|step|0.5"


def test_a_mark_of_windows_is_no_text_and_another_encoding_is_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("model_dir = '模型'\n", encoding="utf-8-sig")
    assert NPURunConfig.from_file(path).model_dir == "模型"
    path.write_text("tf_random_seed = 1\nmodel_dir = '模型'\n", encoding="gbk")
    with pytest.raises(ValueError, match=r"run\.toml:2: the line is not UTF-8\. .*got the byte 0xD0\. Save the file"):
        NPURunConfig.from_file(path)


def test_overrides_win(tmp_path):
    config = _load(tmp_path, "hccl_timeout = 5\niterations_per_loop = 0\n", iterations_per_loop=1)
    assert (config._hccl_timeout, config.iterations_per_loop) == (5, 1)


@refuses(
    ("\nprecison_mode = 'x'", ValueError, ["run.toml:2: key precison_mode:", "Did you mean 'precision_mode'"]),
    ("\n\niterations_per_loop = 0", ValueError, "run.toml:3: key iterations_per_loop: "),
    ("hccl_timeout = 'x'", TypeError, "run.toml:1: key hccl_timeout: "),
    ("[dump_config]\n\ndump_data = 'x'", ValueError, "run.toml:3: key dump_config.dump_data: "),
    ("[dump_config]\ndump_dta = 'x'", ValueError, "run.toml:2: key dump_config.dump_dta: "),
    ("[dump_config]\nenable_dump = true", ValueError, ["run.toml:1: key dump_config:", "dump_path"]),
    ("[dynamic_input_config]\ninput_shape = 'a:-1'", TypeError, "run.toml:1: key dynamic_input_config: "),
    ("dump_config = 5", ValueError, ["run.toml:1: key dump_config:", "table"]),
    ("enable_dump = true", ValueError, ["run.toml:1: key enable_dump:", "It belongs to DumpConfig"]),
    ("memory_config = {atomic_clean_policy = 'x'}", TypeError, "run.toml:1: key memory_config"),
    ("precision_mode = 'force_fp16'\nprecision_mode_v2 = 'fp16'", ValueError, "run.toml:2: key precision_mode_v2: "),
    (
        "precision_mode_v2 = 'fp16'\n[experimental_config]\naccelerate_train_mode = 'fast|step'",
        ValueError,
        "run.toml:3: key experimental_config.accelerate_train_mode: ",
    ),
    ("session_config = 'x'", ValueError, ["run.toml:1: key session_config:", "from_file(path, session_config="]),
    ("iterations_per_loop =", ValueError, "run.toml:1: NPURunConfig: it is not TOML"),
    ("a = 1\na = 2", ValueError, "run.toml:2: NPURunConfig: it is not TOML"),
)
def test_errors_name_file_line_and_key(text, tmp_path):
    _load(tmp_path, text)


def test_missing_file_is_an_os_error(tmp_path):
    (tmp_path / "run.toml").touch()
    with pytest.raises(FileNotFoundError, match=r"from_file: .*got .*/rum\.toml\. Did you mean 'run\.toml'\?"):
        NPURunConfig.from_file(tmp_path / "rum.toml")
    with pytest.raises(OSError, match="from_file: the file cannot be read. Expected a TOML file; got .* is a folder"):
        NPURunConfig.from_file(tmp_path)
    with pytest.raises(TypeError, match="from_file: .*Name a TOML file"):
        NPURunConfig.from_file(None)


@refuses(
    ValueError,
    ("precision_mode = '" + "x=1|" * 5000 + "'", "too long"),
    ("x = " + "[\n" * 30_000, "nested too deeply"),
    ("save_checkpoints_steps = 1\n" * 400_000, "too large. Expected at most 64 KiB"),
    ("a" + ".a" * 30_000 + " = 1", "too long"),
    (("a" + ".a" * 1000 + " = 1\n") * 30, "a key of at most 16 dots"),
    ("x = " + "1" * 4050, "unknown option 'x'"),
    says=["run.toml"],
)
def test_a_file_that_nobody_can_mean_is_refused_at_once(text, tmp_path):
    _load(tmp_path, text)


def test_what_people_write_is_within_the_bounds(tmp_path):
    numbers = ", ".join(f"{number}.5" for number in range(400))
    layers = " ".join(f"bert/encoder/layer_{number}/dense.kernel" for number in range(80))
    text = f"# {'.' * 100}\n[dump_config]\ndump_layer = '{layers}'\nx = [\n{numbers}\n]\n"
    with pytest.raises(ValueError, match="unknown option 'x'"):
        _load(tmp_path, text)
