"""`npu-run explain`: lists the stages that a configuration file adds between backward pass and update."""

from __future__ import annotations

import click

from npu_bridge.base.environment import read_overlapped_steps, read_variable, write_variable
from npu_bridge.base.terminal import echo
from npu_bridge.collective.cost_model import LEAST_WAIT
from npu_bridge.reporting.picture_style import PICTURE_FILES
from npu_run.command_line import Command, add_json_option, exit_on_errors, print_json
from npu_run.errors import LaunchError
from npu_run.outputs import check_output_file
from npu_run.predict.units import parse_count


@click.command(cls=Command)
@click.argument("file")
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Ranks that train.")
@click.option("--params", default="1M", show_default=True, metavar="N", help="Trained parameters, float32: 110M, 1.3B.")
@click.option("-o", "--out", metavar="FILE", help="Draw it, too (SVG).")
@add_json_option
def explain(file: str, ranks: int, params: str, out: str | None, as_json: bool):
    """Lists the stages between backward pass and update: their order, needs and results, and the bytes a rank sends.

    FILE is a TOML file for NPURunConfig.from_file. The command assumes an NPUOptimizer with the stages of FILE. This
    optimizer averages gradients over the ranks and scales the loss.
    """
    with exit_on_errors(LaunchError, OSError, TypeError, ValueError):
        count = parse_count(params, "--params")
        check_output_file(out, "--out", PICTURE_FILES)
        if read_variable("TF_CPP_MIN_LOG_LEVEL") is None:
            write_variable("TF_CPP_MIN_LOG_LEVEL", 2)
        _explain_config_file(file, ranks, count, out, as_json)


def _explain_config_file(path: str, ranks: int, parameters: int, svg: str | None, as_json: bool) -> None:
    from npu_bridge import stages
    from npu_bridge.estimator.npu.npu_config import NPURunConfig
    from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
    from npu_bridge.gradients.explanation import list_stages, ring_all_reduce_bytes, sum_sent_bytes

    config = NPURunConfig.from_file(path)
    manager = FixedLossScaleManager(2.0**15)
    pipeline = stages.pipeline("explained", manager, is_distributed=True, stages=config.stages, owner=path)
    text = stages.explain(pipeline, svg=svg, ranks=ranks)
    rows = list_stages(pipeline, ranks)
    plain = ring_all_reduce_bytes(ranks) * parameters
    sent = sum_sent_bytes(rows, ranks)
    total = None if sent is None else sent * parameters
    overlap = _describe_overlap(config, rows, ranks)
    precision = _describe_precision(config)
    if as_json:
        listed = [
            {**row._asdict(), "needs": [*map(str, row.needs)], "gives": [*map(str, row.gives)], "sends": row.sends}
            for row in rows
        ]
        facts = {"file": path, "ranks": ranks, "parameters": parameters, "stages": listed}
        facts["overlapping_steps"], facts["precision"] = overlap, precision
        print_json(0, {**facts, "sent_bytes": total, "sent_bytes_without_stages": plain})
    elif ranks == 1:
        echo(f"{text}\nOne rank sends nothing.")
    else:
        with_stages = "bytes that depend on the training" if total is None else _format_bytes(total)
        echo(f"{text}\nFor a batch, each of {ranks} ranks sends {with_stages}; {_format_bytes(plain)} without stages.")
    for sentence in (precision, overlap):
        if sentence and not as_json:
            echo(sentence)


def _describe_precision(config) -> str | None:
    """Returns a sentence on the dtypes in which steps compute here; None if these are the dtypes of the graph."""
    from npu_bridge.options.reading import read_run_config
    from npu_bridge.session.precision import ORIGINAL, Precision

    precision = Precision(read_run_config(config))
    if precision.low is not None:
        return f"Precision: {precision.low}, then {precision.configured}."
    return None if precision.configured == ORIGINAL else f"Precision: {precision.configured}."


def _describe_overlap(config, rows, ranks: int) -> str | None:
    """Returns a sentence on whether the steps of a run can overlap, and why; None if a run has one step."""
    from npu_bridge.collective.cost_model import LEAST_STEPS
    from npu_bridge.options.reading import read_run_config
    from npu_bridge.session.precision import Precision

    if config.iterations_per_loop == 1:
        return None
    asked = read_overlapped_steps()
    sending = [row.name for row in rows if row.sends is not None and row.place == "reduce"]
    waiting = [row.name for row in rows if row.place == "clip by norm"]
    if ranks == 1:
        reason = "one rank sends nothing"
    elif asked is False:
        reason = "NPU_OVERLAPPED_STEPS=0 turns it off"
    elif config.iterations_per_loop <= LEAST_STEPS:
        reason = f"iterations_per_loop={config.iterations_per_loop} is too short: it takes more than {LEAST_STEPS}"
    elif Precision(read_run_config(config)).is_active:
        reason = "with a precision mode, the operators of a step are chosen at every run"
    elif not sending:
        reason = "no stage reduces gradients before the update"
    elif sending != ["AllReduce"]:
        reason = f"{sending[0]} does not all-reduce gradients in fragments"
    elif waiting:
        reason = f"{waiting[0]} needs all reduced gradients before the first update"
    elif asked:
        return "Steps overlap, as NPU_OVERLAPPED_STEPS=1 asks for it."
    else:
        return (
            f"Steps overlap where ranks wait for the network for at least {LEAST_WAIT:.0%} of a step and a trial finds "
            "it faster; the log of the training says what was chosen."
        )
    return f"Steps do not overlap: {reason}."


def _format_bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} bytes"
