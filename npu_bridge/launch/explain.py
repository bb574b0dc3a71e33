"""`npu-run explain`: what a configuration file has happen to gradients, stage by stage."""

from __future__ import annotations

import click

from npu_bridge.base.environment import read_variable, write_variable
from npu_bridge.base.terminal import echo
from npu_bridge.launch.command_line import SETTINGS, Command, ending_on
from npu_bridge.launch.errors import LaunchError
from npu_bridge.launch.outputs import check_file
from npu_bridge.launch.predict.units import parse_count
from npu_bridge.reporting.picture_style import PICTURE_FILES

__all__ = ["explain"]


@click.command(cls=Command, context_settings=SETTINGS)
@click.option("--config", required=True, metavar="FILE", help="A TOML file that NPURunConfig.from_file reads.")
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Ranks that train.")
@click.option("--params", default="1M", show_default=True, metavar="N", help="Trained parameters, float32: 110M, 1.3B.")
@click.option("--svg", metavar="FILE", help="Draw it, too.")
def explain(config: str, ranks: int, params: str, svg: str | None):
    """Lists the stages between backward pass and update: their order, needs and gifts, and bytes that a rank sends.

    The stages are those of the file in an NPUOptimizer that averages gradients over the ranks and scales the loss.
    """
    with ending_on(LaunchError, OSError, TypeError, ValueError, command="explain"):
        count = parse_count(params, "--params")
        check_file(svg, "--svg", PICTURE_FILES)
        if read_variable("TF_CPP_MIN_LOG_LEVEL") is None:
            write_variable("TF_CPP_MIN_LOG_LEVEL", 2)
        echo(_explained(config, ranks, count, svg))


def _explained(path: str, ranks: int, parameters: int, svg: str | None) -> str:
    from npu_bridge import stages
    from npu_bridge.estimator.npu.npu_config import NPURunConfig
    from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
    from npu_bridge.gradients.explanation import bytes_unchanged, bytes_with, list_stages

    added = NPURunConfig.from_file(path).stages
    manager = FixedLossScaleManager(2.0**15)
    pipeline = stages.pipeline("explained", manager, is_distributed=True, stages=added, owner=path)
    text = stages.explain(pipeline, svg=svg, ranks=ranks)
    if ranks == 1:
        return f"{text}\nOne rank sends nothing."
    plain = f"{_amount(bytes_unchanged(ranks) * parameters)} without stages"
    sent = bytes_with(list_stages(pipeline, ranks), ranks)
    with_stages = "bytes that depend on the training" if sent is None else _amount(sent * parameters)
    return f"{text}\nFor a batch, each of {ranks} ranks sends {with_stages}; {plain}."


def _amount(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} bytes"
