"""`npu-run plan`: predicts the speed of a training on n ranks without the n machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from npu_bridge.collective.cost_model import LEAST_STEPS, NetworkLink, StepPrediction, TrainingCosts, predict_step_time
from npu_bridge.reporting.page.run_folder import read_run_folder
from npu_bridge.reporting.picture_style import PLAN_FILES
from npu_bridge.reporting.summary import summarize
from npu_run.command_line import Command, add_json_option, exit_on_errors, print_json
from npu_run.errors import LaunchError
from npu_run.outputs import check_output_file
from npu_run.predict.units import parse_bytes_per_sec, parse_count, parse_ranks, parse_secs
from npu_run.table import PlainConsole, print_table, print_text

_HEADINGS = (
    "ranks",
    "sum alone",
    "step, unset split",
    "step, best split",
    "exposed",
    "efficiency",
    "overlapping",
    "best split, %",
)
_VALUE_BYTES = 4
_MOST_TENSORS = 1e6
_WIRE_SHARES = {"none": 1.0, "float16": 0.5, "bfloat16": 0.5}


@click.command(cls=Command)
@click.option("--params", required=True, metavar="N", help="Trained parameters, float32: 110M, 1.3B.")
@click.option("--bandwidth", required=True, metavar="RATE", help="Rate of each host's link: 1Gbit, 125MB/s.")
@click.option(
    "--latency", default="50us", show_default=True, metavar="TIME", help="Latency one way: half of ping's time."
)
@click.option("--ranks", default="1..64", show_default=True, metavar="LIST", help="Numbers of ranks: 1,2,6 or 1..4096.")
@click.option("--compute-secs", metavar="TIME", help="Time of a step on one rank: 0.2, 180ms.")
@click.option("--from-run", metavar="FOLDER", help="Take this time from the folder of a training on one rank.")
@click.option("--wire", type=click.Choice(list(_WIRE_SHARES)), default="none", help="Format gradients are sent in.")
@click.option("--tensors", default="100", show_default=True, metavar="N", help="Number of trained variables.")
@click.option(
    "--host-bytes-per-sec",
    default="1.5GB/s",
    show_default=True,
    metavar="RATE",
    help="Gradients a host packs, adds up and unpacks.",
)
@click.option("-o", "--out", metavar="FILE", help="Draw step time and exposed communication over ranks (PNG).")
@add_json_option
def plan(params, bandwidth, latency, ranks, wire, tensors, host_bytes_per_sec, as_json, out, **step_time):
    """Predicts step time, exposed communication and the best gradient split for numbers of ranks.

    Every rank trains its own batch, so n ranks do n times the work of one. docs/plan.md explains the numbers and their
    accuracy.
    """
    with exit_on_errors(LaunchError):
        training = TrainingCosts(
            parse_count(params, "--params") * _VALUE_BYTES,
            _choose_compute_secs(**step_time),
            parse_count(tensors, "--tensors", _MOST_TENSORS),
            _WIRE_SHARES[wire],
        )
        link = NetworkLink(
            parse_bytes_per_sec(bandwidth, "--bandwidth"),
            parse_secs(latency, "--latency"),
            host_bytes_per_sec=parse_bytes_per_sec(host_bytes_per_sec, "--host-bytes-per-sec"),
        )
        predictions = [predict_step_time(number, training, link) for number in parse_ranks(ranks, "--ranks")]
        if out:
            check_output_file(out, "--out", PLAN_FILES)
            _draw_plan(predictions, training, out)
    if as_json:
        print_json(0, as_facts(predictions, training, link))
    else:
        print_plan(predictions, training, link)


def _draw_plan(predictions, training, path: str) -> None:
    from npu_bridge.reporting.picture import draw_plan

    try:
        draw_plan(predictions, training.compute_secs, path)
    except (ImportError, OSError) as error:
        raise LaunchError(f"--out {path}: {error}") from error


def _choose_compute_secs(compute_secs: str | None, from_run: str | None) -> float:
    if compute_secs is not None and from_run is not None:
        raise LaunchError("--compute-secs and --from-run exclude each other. Give only one option.")
    if from_run is not None:
        return _read_step_secs(from_run)
    return parse_secs(compute_secs, "--compute-secs") if compute_secs is not None else 0.0


def _read_step_secs(folder: str) -> float:
    """Returns the step time of a training on one rank, which includes no waiting for other ranks."""
    try:
        run = summarize(read_run_folder(folder).history)
    except (OSError, ValueError) as error:
        raise LaunchError(f"--from-run {folder} cannot be used: {error}") from error
    if run.ranks != 1:
        raise LaunchError(
            f"--from-run {folder} is of a run on {run.ranks} ranks, whose steps include communication. Expected a run "
            f"on one rank. Run the script on one rank, or give --compute-secs."
        )
    if not run.steps_per_sec:
        raise LaunchError(f"--from-run {folder} has too few steps to tell their time. Train longer on one rank.")
    return 1.0 / run.steps_per_sec


def as_facts(predictions: Sequence[StepPrediction], training: TrainingCosts, link: NetworkLink) -> dict[str, Any]:
    """Returns all predictions as plain data, in bytes and seconds."""
    return {
        "gradient_bytes": training.gradient_bytes,
        "wire_bytes": training.gradient_bytes * training.wire_share,
        "compute_secs": training.compute_secs,
        "tensors": training.tensors,
        "bytes_per_sec": link.bytes_per_sec,
        "latency_secs": link.latency_secs,
        "host_bytes_per_sec": link.host_bytes_per_sec,
        "predictions": [
            {
                **prediction._asdict(),
                "percentages": list(prediction.percentages),
                "efficiency": _efficiency(prediction, training),
            }
            for prediction in predictions
        ],
    }


def print_plan(predictions: Sequence[StepPrediction], training: TrainingCosts, link: NetworkLink) -> None:
    """Prints a row for each number of ranks, and the assumptions."""
    console = PlainConsole()
    rows = [_table_row(prediction, training) for prediction in predictions]
    print_table(rows, console, headings=_HEADINGS, right_aligned_columns=len(_HEADINGS) - 1)
    print_text(console, _describe_assumptions(predictions, training, link))


def format_secs(secs: float) -> str:
    """Returns a time as text with three significant digits."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if secs < limit:
            return f"{secs * factor:.3g} {unit}" if secs else "0"
    return f"{secs:.3g} s" if secs < 100 else f"{secs:.0f} s"


def _table_row(prediction: StepPrediction, training: TrainingCosts) -> tuple[str, ...]:
    return (
        str(prediction.ranks),
        format_secs(prediction.communication_secs),
        format_secs(prediction.default_step_secs),
        format_secs(prediction.step_secs),
        format_secs(prediction.exposed_secs),
        f"{100 * _efficiency(prediction, training):.0f} %" if training.compute_secs else "-",
        "-" if prediction.overlapped_secs is None else format_secs(prediction.overlapped_secs),
        _format_shares(prediction) if prediction.ranks > 1 else "-",
    )


def _format_shares(prediction: StepPrediction) -> str:
    return ", ".join(f"{share:g}" for share in prediction.percentages)


def _efficiency(prediction: StepPrediction, training: TrainingCosts) -> float:
    """Returns the work done per second, relative to ranks that do not communicate."""
    return training.compute_secs / prediction.step_secs if prediction.step_secs else 1.0


def _describe_overlap(predictions):
    others = [prediction for prediction in predictions if prediction.ranks > 1]
    gains = {
        prediction.ranks: 1 - prediction.overlapped_secs / prediction.default_step_secs
        for prediction in others
        if prediction.overlapped_secs is not None
    }
    if not gains:
        return (
            f"Overlapping steps (iterations_per_loop above {LEAST_STEPS}) would gain nothing, as ranks hardly wait for "
            f"the network."
        )
    most = max(gains, key=gains.get)
    return (
        f"Overlapping steps (iterations_per_loop above {LEAST_STEPS}) save {100 * gains[most]:.0f} % of the step with "
        f"the unset split on {most} ranks{', and nothing where no time is given' if len(gains) < len(others) else ''}."
    )


def _describe_assumptions(predictions: Sequence[StepPrediction], training: TrainingCosts, link: NetworkLink) -> str:
    lines = [
        f"{training.gradient_bytes * training.wire_share / 1e6:.4g} MB of gradients on the wire, "
        f"{format_secs(training.compute_secs)} of computation, links of {link.bytes_per_sec * 8e-9:.4g} Gbit/s with "
        f"{format_secs(link.latency_secs)} each way."
    ]
    if not training.compute_secs:
        lines.append("Without a step time all communication counts as exposed: give --compute-secs or --from-run.")
    elif any(prediction.ranks > 1 for prediction in predictions):
        lines.append(_describe_overlap(predictions))
    for prediction in reversed(predictions):
        if len(prediction.percentages) > 1:
            call = f"set_split_strategy_by_size([{_format_shares(prediction)}])"
            lines.append(f"For {prediction.ranks} ranks, before compute_gradients: {call}")
            break
    return "\n".join(lines)
