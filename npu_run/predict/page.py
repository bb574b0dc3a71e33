"""Shows the predictions of `npu-run plan` as a table for people and as facts for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_bridge.collective.cost_model import Link, Prediction, Training
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


def as_facts(predictions: Sequence[Prediction], training: Training, link: Link) -> dict[str, Any]:
    """Returns all predictions as numbers: bytes and seconds."""
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


def print_plan(predictions: Sequence[Prediction], training: Training, link: Link) -> None:
    """Prints one row for each number of ranks, and the assumptions."""
    console = PlainConsole()
    rows = [_row(prediction, training) for prediction in predictions]
    print_table(rows, console, headings=_HEADINGS, right=len(_HEADINGS) - 1)
    print_text(console, _foot(predictions, training, link))


def format_secs(secs: float) -> str:
    """Returns a time with three significant digits."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if secs < limit:
            return f"{secs * factor:.3g} {unit}" if secs else "0"
    return f"{secs:.3g} s" if secs < 100 else f"{secs:.0f} s"


def _row(prediction: Prediction, training: Training) -> tuple[str, ...]:
    return (
        str(prediction.ranks),
        format_secs(prediction.communication_secs),
        format_secs(prediction.default_step_secs),
        format_secs(prediction.step_secs),
        format_secs(prediction.exposed_secs),
        f"{100 * _efficiency(prediction, training):.0f} %" if training.compute_secs else "-",
        "-" if prediction.overlapped_secs is None else format_secs(prediction.overlapped_secs),
        _shares(prediction) if prediction.ranks > 1 else "-",
    )


def _shares(prediction: Prediction) -> str:
    return ", ".join(f"{share:g}" for share in prediction.percentages)


def _efficiency(prediction: Prediction, training: Training) -> float:
    """Returns the work done per second, relative to ranks without communication."""
    return training.compute_secs / prediction.step_secs if prediction.step_secs else 1.0


def _about_overlap(predictions):
    others = [prediction for prediction in predictions if prediction.ranks > 1]
    gains = {
        prediction.ranks: 1 - prediction.overlapped_secs / prediction.default_step_secs
        for prediction in others
        if prediction.overlapped_secs is not None
    }
    if not gains:
        return (
            "Overlapping steps (iterations_per_loop above 1) would gain nothing, as ranks hardly wait for the network."
        )
    most = max(gains, key=gains.get)
    return (
        f"Overlapping steps (iterations_per_loop above 1) save {100 * gains[most]:.0f} % of the step with the unset "
        f"split on {most} ranks{', and nothing where no time is given' if len(gains) < len(others) else ''}."
    )


def _foot(predictions: Sequence[Prediction], training: Training, link: Link) -> str:
    lines = [
        f"{training.gradient_bytes * training.wire_share / 1e6:.4g} MB of gradients on the wire, "
        f"{format_secs(training.compute_secs)} of computation, links of {link.bytes_per_sec * 8e-9:.4g} Gbit/s with "
        f"{format_secs(link.latency_secs)} each way."
    ]
    if not training.compute_secs:
        lines.append("Without a step time all communication counts as exposed: give --compute-secs or --from-summary.")
    elif any(prediction.ranks > 1 for prediction in predictions):
        lines.append(_about_overlap(predictions))
    for prediction in reversed(predictions):
        if len(prediction.percentages) > 1:
            call = f"set_split_strategy_by_size([{_shares(prediction)}])"
            lines.append(f"For {prediction.ranks} ranks, before compute_gradients: {call}")
            break
    return "\n".join(lines)
