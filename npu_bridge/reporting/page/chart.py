"""Draws the charts of the report page as SVG."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from npu_bridge.reporting.page import axes
from npu_bridge.reporting.page.axes import Axis
from npu_bridge.reporting.page.curves import Curves, StepBucket, ValueRange, can_be_drawn, smooth_trend
from npu_bridge.reporting.progress_line import format_loss, format_rate, format_scale, format_steps

WIDTH, LEFT, RIGHT = 1000, 66, 916  # units of the drawing; curves are between LEFT and RIGHT
_TOP, _BELOW = 14, 26
_TALL, _LOW = 250, 110
_MOST_METRICS = 6
_END_CHARACTERS = 8  # longest text on the right


class EndLabel(NamedTuple):
    """The label at the end of a curve.

    Attributes:
      number: position of the label on the vertical axis, as a value.
      text: text of the label, such as the number.
      note: a line below the text that describes the number.
      kind: CSS class of the label's colour; "" for the colour of the figure.
    """

    number: float
    text: str
    note: str = ""
    kind: str = ""


class _Point(NamedTuple):
    x: float
    low: float
    mean: float
    high: float


def draw_charts(curves: Curves) -> list[str]:
    """Draws a figure for each quantity that the curves have; all figures have the same steps on the horizontal axis.

    Args:
      curves: curves with at least one bucket.
    Returns:
      Texts of HTML `figure` elements. Each `svg` carries `data-name`, and `data-last-step` with the global step at the
      end of its curve.
    """
    buckets = curves.buckets
    x = axes.make_axis_without_margins(buckets[0].first, buckets[-1].last, LEFT, RIGHT)
    made = [_draw_loss(curves, x), *_draw_metrics(curves, x)]
    if any(bucket.loss_scale for bucket in buckets):
        made.append(_draw_loss_scale(curves, x))
    if any(bucket.skipped for bucket in buckets):
        made.append(_draw_skipped_steps(curves, x))
    if any(bucket.learning_rate for bucket in buckets):
        made.append(_draw_learning_rate(curves, x))
    if curves.speeds:
        made.append(_draw_speed(curves, x))
    return made


def _draw_loss(curves: Curves, x: Axis) -> str:
    buckets = curves.buckets
    numbers = [end for bucket in buckets if bucket.loss for end in (bucket.loss.low, bucket.loss.high)]
    evaluated = _evaluation_points(curves).pop("loss", {})
    numbers += [number for points in evaluated.values() for _, _, number in points]
    y = axes.make_loss_axis(numbers, _TOP + _TALL, _TOP)
    runs = _split_at_gaps(buckets, x, lambda bucket: bucket.loss)
    body = [
        *_draw_low_precision_steps(buckets, x, y),
        *_draw_bands(runs, y),
        *(_draw_path(run, y, "raw") for run in runs),
    ]
    body += [_draw_path(_make_trend_points(run), y, "line") for run in runs if len(run) > 1]
    dots = [(run[0].x, y.position_of(run[0].mean)) for run in runs if len(run) == 1]
    body += [f'<circle class="dot" cx="{left:.1f}" cy="{top:.1f}" r="3"/>' for left, top in dots]
    body += _draw_marks(buckets, x, y)
    note = "lowest, highest and mean of each bucket" if curves.steps_per_bucket > 1 else "each step, and the trend"
    legend = [("line", note)]
    for name, points in evaluated.items():
        body += _draw_evaluations(points, x, y, name)
        legend.append(("evaluation", name or "evaluation"))
    if any(bucket.skipped for bucket in buckets):
        legend.append(("skip", "skipped"))
    dtypes = {bucket.precision for bucket in buckets if bucket.precision} - {"float32"}
    legend += [("lowered", dtype) for dtype in sorted(dtypes)]
    ends = []
    for bucket in buckets[::-1]:
        if bucket.loss is not None:
            ends.append(
                EndLabel(bucket.loss.mean, _format_short(bucket.loss.mean), _describe_end_value(bucket, buckets[-1]))
            )
            break
    return _draw_curve_figure("loss", "Loss", curves, x, y, body, ends, legend=legend)


def _describe_end_value(bucket: StepBucket, last: StepBucket) -> str:
    """Returns the note below the number at the end of a curve: over how many steps it is a mean, or its step."""
    if bucket.recorded > 1:
        return f"mean of {bucket.recorded}"
    return "last step" if bucket is last else f"step {bucket.step}"


def _evaluation_points(curves: Curves) -> dict[str, dict[str, list[tuple[int, int, float]]]]:
    """Returns position, step and value of each evaluation that can be drawn, by metric and name of the evaluation."""
    found: dict[str, dict[str, list[tuple[int, int, float]]]] = {}
    for place, evaluation in curves.evaluations:
        for metric, number in evaluation.metrics.items():
            if can_be_drawn(number):
                points = found.setdefault(metric, {}).setdefault(evaluation.name, [])
                points.append((place, evaluation.step, number))
    return found


def _draw_evaluations(points: Sequence[tuple[int, int, float]], x: Axis, y: Axis, name: str) -> list[str]:
    """Draws evaluations as dots, connected by lines."""
    said = f"evaluation {name}".strip()
    dots = [(x.position_of(place), y.position_of(number), step, number) for place, step, number in points]
    return [
        f'<path class="evaluation" d="{svg_path_data((cx, cy) for cx, cy, _, _ in dots)}"/>',
        *(
            f'<circle class="evaluation" cx="{cx:.1f}" cy="{cy:.1f}" r="3.5"><title>'
            f"{escape(said)} at step {step}: {format_loss(number)}</title></circle>"
            for cx, cy, step, number in dots
        ),
    ]


def _draw_metrics(curves: Curves, x: Axis) -> list[str]:
    """Draws a chart for each metric of evaluations except the loss; a metric with a single value becomes a tile."""
    made: list[str] = []
    single: list[tuple[str, str, str]] = []
    for metric, by_name in itertools.islice(_evaluation_points(curves).items(), _MOST_METRICS + 1):
        if metric == "loss" or len(made) + len(single) == _MOST_METRICS:
            continue
        if all(len(points) == 1 for points in by_name.values()):  # a chart would have only a dot
            single += [
                (f"{metric} {name}".strip(), _format_short(n), f"step {step:,}")
                for name, [(_, step, n)] in by_name.items()
            ]
            continue
        y = axes.make_loss_axis([number for points in by_name.values() for *_, number in points], _TOP + _LOW, _TOP)
        body = [part for name, points in by_name.items() for part in _draw_evaluations(points, x, y, name)]
        ends = [EndLabel(points[-1][2], _format_short(points[-1][2]), name) for name, points in by_name.items()]
        made.append(_draw_curve_figure("evaluated", f"Evaluation: {metric}", curves, x, y, body, ends))
    return [*([html_tiles(single)] if single else []), *made]


def html_tiles(rows: Iterable[tuple[str, str, str]]) -> str:
    """Returns HTML with a tile for each row: label, value, and a remark in small print."""
    shown = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)} <small>{escape(remark)}</small></dd></div>"
        for label, value, remark in rows
    )
    return f'<dl class="tiles">{shown}</dl>'


def _draw_loss_scale(curves: Curves, x: Axis) -> str:
    runs = _split_at_gaps(curves.buckets, x, lambda bucket: bucket.loss_scale)
    numbers = [number for run in runs for point in run for number in (point.low, point.high) if number > 0]
    y = axes.make_power_of_two_axis(numbers or [1.0], _TOP + _LOW, _TOP)
    # A mean of loss scales is no loss scale: the line is at the lowest loss scale of each bucket.
    lowest = [[point._replace(mean=point.low) for point in run] for run in runs]
    body = [*_draw_bands(runs, y), *(_draw_path(_make_stair_points(run), y, "line") for run in lowest)]
    last = runs[-1][-1].low
    return _draw_curve_figure(
        "scale", "Loss scale", curves, x, y, body, [EndLabel(last, format_scale(last))], format_y=format_scale
    )


def _draw_skipped_steps(curves: Curves, x: Axis) -> str:
    points, total = [_Point(x.start, 0, 0, 0)], 0
    for bucket in curves.buckets:
        total += bucket.skipped
        points.append(_single_value_point(x.position_of(bucket.last), total))
    y = axes.make_linear_axis([0, total], _TOP + _LOW, _TOP, from_zero=True)
    y = y._replace(ticks=[tick for tick in y.ticks if tick == int(tick)])
    body = [_draw_path(_make_stair_points(points), y, "line")]
    return _draw_curve_figure("skipped", "Skipped steps so far", curves, x, y, body, [EndLabel(total, str(total))])


def _draw_learning_rate(curves: Curves, x: Axis) -> str:
    runs = _split_at_gaps(curves.buckets, x, lambda bucket: bucket.learning_rate)
    y = axes.make_linear_axis([point.high for run in runs for point in run], _TOP + _LOW, _TOP, from_zero=True)
    body = [*_draw_bands(runs, y), *(_draw_path(run, y, "line") for run in runs)]
    last = runs[-1][-1].mean
    return _draw_curve_figure("rate", "Learning rate", curves, x, y, body, [EndLabel(last, f"{last:.3g}")])


def _draw_speed(curves: Curves, x: Axis) -> str:
    y = axes.make_linear_axis([speed.steps_per_sec for speed in curves.speeds], _TOP + _LOW, _TOP, from_zero=True)
    runs: list[list[_Point]] = []
    for number, speed in enumerate(curves.speeds):
        if not number or curves.speeds[number - 1].last != speed.first:
            runs.append([_single_value_point(x.position_of(speed.first), speed.steps_per_sec)])
        runs[-1].append(_single_value_point(x.position_of(speed.last), speed.steps_per_sec))
    body = [_draw_path(_make_stair_points(run, uses_later_level=True), y, "line") for run in runs]
    last, steps = curves.speeds[-1].steps_per_sec, curves.speeds[-1].last - curves.speeds[-1].first
    note = f"last {format_steps(steps)}"
    return _draw_curve_figure(
        "speed", "Steps per second", curves, x, y, body, [EndLabel(last, format_rate(last), note)]
    )


def _format_short(number: float) -> str:
    """Formats a number with five digits, or with three if five do not fit on the right."""
    text = format_loss(number)
    return text if len(text) <= _END_CHARACTERS else f"{number:.3g}"


def _split_at_gaps(
    buckets: Sequence[StepBucket], x: Axis, value_range_of: Callable[[StepBucket], ValueRange | None]
) -> list[list[_Point]]:
    """Returns the points of a curve, divided into pieces without gaps."""
    runs: list[list[_Point]] = [[]]
    for bucket in buckets:
        found = value_range_of(bucket)
        if found is None:
            runs.append([])
        else:
            runs[-1].append(_Point(x.position_of((bucket.first + bucket.last) / 2), found.low, found.mean, found.high))
    runs = [run for run in runs if run]
    if (
        runs and buckets and value_range_of(buckets[-1]) is not None
    ):  # the curve ends at the last step, also in a broad bucket
        runs[-1][-1] = runs[-1][-1]._replace(x=x.position_of(buckets[-1].last))
    return runs


def _single_value_point(x: float, number: float) -> _Point:
    return _Point(x, number, number, number)


def _make_stair_points(points: Sequence[_Point], uses_later_level: bool = False) -> list[_Point]:
    """Adds points for stairs; a step has the level of its earlier point, with `uses_later_level` of its later one."""
    stairs = [points[0]]
    for before, after in zip(points, points[1:]):
        stairs += [before._replace(x=after.x) if not uses_later_level else after._replace(x=before.x), after]
    return stairs


def _make_trend_points(run: Sequence[_Point]) -> list[_Point]:
    means = smooth_trend([point.mean for point in run])
    return [_single_value_point(point.x, mean) for point, mean in zip(run, means.tolist())]


def _draw_bands(runs: Iterable[Sequence[_Point]], y: Axis) -> list[str]:
    """Draws the area between lowest and highest values, where the two differ."""
    bands = []
    for run in runs:
        if any(point.low != point.high for point in run):
            edge = [(p.x, y.position_of(p.high)) for p in run] + [(p.x, y.position_of(p.low)) for p in reversed(run)]
            bands.append(f'<path class="band" d="{svg_path_data(edge)}Z"/>')
    return bands


def _draw_path(points: Iterable[_Point], y: Axis, kind: str) -> str:
    return f'<path class="{kind}" d="{svg_path_data((point.x, y.position_of(point.mean)) for point in points)}"/>'


def svg_path_data(places: Iterable[tuple[float, float]]) -> str:
    """Returns positions as the data of an SVG path, to a tenth of a unit; leaves out repeated points."""
    words: list[str] = []
    for x, y in places:
        word = f"{x:.1f} {y:.1f}"
        if not words or words[-1] != word:
            words.append(word)
    return f"M{'L'.join(words)}"


def _draw_low_precision_steps(buckets: Sequence[StepBucket], x: Axis, y: Axis) -> list[str]:
    """Draws the background of steps that were computed in another dtype than float32."""
    boxes, at = [], 0
    for precision, run in itertools.groupby(bucket.precision for bucket in buckets):
        begin = x.position_of(buckets[at].first)
        at += len(list(run))
        if precision not in (None, "float32"):
            end = x.position_of(buckets[at].first) if at < len(buckets) else x.end
            boxes.append(
                f'<rect class="lowered" x="{begin:.1f}" y="{y.end}" width="{max(end - begin, 1):.1f}" '
                f'height="{y.start - y.end}"><title>{escape(precision)}</title></rect>'
            )
    return boxes


def _draw_marks(buckets: Iterable[StepBucket], x: Axis, y: Axis) -> list[str]:
    """Draws a triangle for each bucket with skipped steps, and a cross for a bucket with a loss that is not finite."""
    marks = []
    for bucket in buckets:
        place = x.position_of(bucket.last)
        if bucket.skipped:
            said = f"{format_steps(bucket.skipped)} skipped after step {bucket.step}"
            marks.append(
                f'<path class="skip" d="M{place - 4:.1f} {y.end}h8l-4 7z"><title>{escape(said)}</title></path>'
            )
        elif bucket.not_finite:
            marks.append(
                f'<path class="nan" d="M{place - 3:.1f} {y.end}l6 6m0 -6l-6 6"><title>the loss is not finite at step '
                f"{bucket.step}</title></path>"
            )
    return marks


def _draw_curve_figure(name, title, curves, x, y, body, ends, **more) -> str:
    restarts = [
        f'<path class="restart" d="M{place:.1f} {y.end}V{y.start}"><title>training resumed here</title></path>'
        for place in map(x.position_of, curves.restarts)
    ]
    return draw_figure(name, title, curves.buckets[-1].step, x, y, [*restarts, *body], ends, **more)


def draw_figure(
    name: str,
    title: str,
    last_step: int,
    x: Axis,
    y: Axis,
    body: list[str],
    ends: Sequence[EndLabel],
    format_y: Callable[[float], str] = "{:.4g}".format,
    legend: Iterable[tuple[str, str]] = (),
) -> str:
    """Draws a figure with grid, axes and legend.

    Args:
      name: CSS class of the figure, which sets the colour.
      title: heading of the figure.
      last_step: global step at the end of the curves.
      x, y: the axes.
      body: SVG elements.
      ends: labels at the ends of the curves.
      format_y: formats the ticks of `y`.
      legend: CSS classes and texts.
    """
    height = y.start + _BELOW
    grid = [
        f'<path class="grid" d="M{LEFT} {y.position_of(tick):.1f}H{RIGHT}"/>'
        f'<text x="{LEFT - 8}" y="{y.position_of(tick) + 4:.1f}" text-anchor="end">{escape(format_y(tick))}</text>'
        for tick in y.ticks
    ]
    grid += [
        f'<text x="{x.position_of(tick):.1f}" y="{y.start + 18}" text-anchor="middle">{tick:,.0f}</text>'
        for tick in x.ticks
    ]
    body += _draw_end_labels(ends, y)
    keys = "".join(f'<span class="key {kind}">{escape(text)}</span>' for kind, text in legend)
    spoken = f"{title}: {', '.join(f'{e.text} {e.note}'.strip() for e in ends) or 'not known'} at step {last_step}"
    return (
        f'<figure class="chart {name}"><figcaption><b>{escape(title)}</b>{keys}</figcaption>'
        f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {height}" role="img" tabindex="0" data-name={quoteattr(name)} '
        f'data-last-step="{last_step}" data-top="{y.end}" data-bottom="{y.start}" aria-label={quoteattr(spoken)}>'
        f"{''.join(grid)}{''.join(body)}"
        f'<path class="pointer" d=""/></svg></div></figure>'
    )


def _draw_end_labels(ends: Sequence[EndLabel], y: Axis) -> list[str]:
    """Draws the labels on the right of the curves, without overlaps, and not below the axis."""
    tops: list[float] = []
    ends = sorted(ends, key=lambda end: y.position_of(end.number))
    for before, end in zip([None, *ends], ends):
        least = float("-inf") if before is None else tops[-1] + _height_of_end_label(before)
        tops.append(max(y.position_of(end.number) + 4, least))
    limit = y.start + 2
    for at in range(len(ends) - 1, -1, -1):
        limit -= _height_of_end_label(ends[at]) - 16
        tops[at] = min(tops[at], limit)
        limit = tops[at] - 16
    parts = []
    for end, top in zip(ends, tops):
        note = f'<tspan class="note" x="{RIGHT + 8}" dy="14">{escape(end.note)}</tspan>' if end.note else ""
        place = f'x="{RIGHT + 8}" y="{top:.1f}"'
        parts.append(f'<text class="last {end.kind}" {place}>{escape(end.text)}{note}</text>')
    return parts


def _height_of_end_label(label: EndLabel) -> int:
    return 30 if label.note else 16
