"""Draws one training step as SVG: computation and communication over time, with a shaded exposed tail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from npu_bridge.reporting.page.axes import round_tick_values
from npu_bridge.reporting.picture_style import GRID, INK, svg_picture, svg_text
from npu_bridge.reporting.step_trace import (
    Interval,
    StepTrace,
    Transfer,
    merge_intervals,
    shift_to_one_clock,
    subtract_intervals,
    total_length,
)

_QUIET, _ROW = "#66758a", "#f6f8fa"
_COMPUTE, _UPDATE, _WIRE, _DECISION, _EXPOSED = "#0f8a72", "#7048c6", "#1f6feb", "#b7791f", "#d9480f"
_IDLE = "#f7d4c3"  # as the exposed tail on white
_WIDTH, _LEFT, _RIGHT = 1120, 168, 28
_BAR, _PITCH = 18, 24
_ABOVE, _BELOW, _LEGEND = 84, 44, 34
# More rows are unreadable; transfers then share rows.
_MOST_TRANSFER_ROWS = 16
_FINEST_PX = 0.4
_STYLE = f".tail {{ fill: {_EXPOSED}; font-weight: 600; }}"
_PATTERNS = "".join(
    f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="6" height="6" fill="{color}" fill-opacity="0.14"/>'
    f'<rect width="2" height="6" fill="{color}" fill-opacity="0.5"/></pattern>'
    for name, color in (("waits", _WIRE), ("decision-waits", _DECISION))
)


class _PictureRow(NamedTuple):
    label: str
    intervals: Sequence[Interval] = ()
    color: str = ""
    transfers: Sequence[Transfer] = ()


def draw_step(trace: StepTrace, ranks: int = 1) -> str:
    """Draws one step of one rank.

    Args:
      trace: the step.
      ranks: number of ranks of the job.
    Returns:
      The text of an SVG file. Its elements have the classes `row`, `compute`, `update`, `wait`, `wire`, `exposed` and
      `backward-end`; the root has `data-ms-per-px`.
    """
    place = f"Step {trace.step}, rank {trace.rank}" + (f" of {ranks}" if ranks > 1 else "")
    return _draw_panels([(trace, place)])


def compare(before: StepTrace, after: StepTrace, titles: tuple[str, str] = ("before", "after")) -> str:
    """Draws two steps to the same scale, one below the other.

    Args:
      before, after: the steps.
      titles: prefixes of the headings, which give step and rank.
    Returns:
      The text of an SVG file, as from `draw_step`.
    """
    pairs = zip((before, after), titles)
    return _draw_panels([(trace, f"{title}: step {trace.step}, rank {trace.rank}") for trace, title in pairs], gap=14)


def draw_overlapping_steps(traces: Sequence[StepTrace], ranks: int = 1) -> str:
    """Draws overlapping steps of one rank over the same time axis.

    Args:
      traces: at least one trace, in order.
      ranks: number of ranks of the job.
    Returns:
      The text of an SVG file. Steps alternate between two colors. Its elements have the classes `row`, `compute`,
      `update`, `wire`, `idle` (nothing is on the wire, between the first and the last transfer) and `backward-end`; the
      root has `data-ms-per-px`.
    """
    traces = shift_to_one_clock(traces)
    scale = _TimeScale(max(trace.duration_ms for trace in traces))
    sent = merge_intervals((transfer.wire_ms, transfer.end_ms) for trace in traces for transfer in trace.transfers)
    idle = subtract_intervals([(sent[0][0], sent[-1][1])], sent) if sent else []
    tops = [_ABOVE + _PITCH * number for number in range(len(_OVERLAPPING_ROWS) + 1)]
    body = [
        svg_text(18, 28, f"Steps {traces[0].step} to {traces[-1].step}, rank {traces[0].rank} of {ranks}", "title"),
        svg_text(18, 49, _overlap_subtitle(traces, scale, idle), "quiet"),
        *_draw_grid(scale, tops[0], tops[-1]),
        *(part for row, top in zip(_OVERLAPPING_ROWS, tops) for part in _draw_row(row[0], top)),
    ]
    for number, trace in enumerate(traces):
        for (label, kind, intervals_of, colors), top in zip(_OVERLAPPING_ROWS, tops):
            for interval, name in intervals_of(trace, _FINEST_PX * scale.ms_per_px):
                text = f"step {trace.step}, {name or label}: {_format_ms(interval[1] - interval[0])}"
                body.append(_draw_bar(scale, interval, top, kind, colors[number % 2], text))
        body += _draw_backward_end(trace, scale, tops[0], tops[-1], f"backward pass {trace.step} ends")
    for begin, end in idle:
        text = f"nothing is on the wire for {_format_ms(end - begin)}"
        body.append(_draw_bar(scale, (begin, end), tops[1], "idle", _IDLE, text))
    attributes = f' data-ms-per-px="{scale.ms_per_px!r}"'
    return svg_picture(body, _WIDTH, tops[-1] + _BELOW, _QUIET, _STYLE, _PATTERNS, attributes)


def _merge_without_labels(intervals, gap):
    return [(interval, "") for interval in merge_intervals(intervals, gap)]


def _label_wire_intervals(trace, gap):
    return [((transfer.wire_ms, transfer.end_ms), _label_of_transfers([transfer], 0)) for transfer in trace.transfers]


# Label and class of each row, a function that returns its intervals and their names, without gaps of so many ms, and
# the alternating colors of steps.
_OVERLAPPING_ROWS = (
    (
        "forward, backward",
        "compute",
        lambda trace, gap: _merge_without_labels(trace.compute, gap),
        (_COMPUTE, "#7cc4b5"),
    ),
    ("on the wire", "wire", _label_wire_intervals, (_WIRE, "#86b3f7")),
    ("updates", "update", lambda trace, gap: _merge_without_labels(trace.updates, gap), (_UPDATE, "#b49be4")),
)


def _overlap_subtitle(traces, scale, idle):
    return (
        f"{len(traces)} steps in {_format_ms(scale.duration_ms)}, darker and lighter in turns; between the first "
        f"transfer and the last one, nothing is on the wire for {_format_ms(total_length(idle))} (orange)"
    )


def _draw_panels(panels: Sequence[tuple[StepTrace, str]], gap: int = 0) -> str:
    """Draws traces with their headings to the same scale, with a gap after each trace, and a legend."""
    scale = _TimeScale(max(trace.duration_ms for trace, _ in panels))
    body: list[str] = []
    top = 0
    for trace, heading in panels:
        rows = _rows_of_trace(trace)
        body += _draw_panel(trace, rows, scale, top, heading)
        top += _ABOVE + _PITCH * len(rows) + _BELOW + gap
    attributes = f' data-ms-per-px="{scale.ms_per_px!r}"'
    return svg_picture([*body, *_draw_legend(top)], _WIDTH, top + _LEGEND, _QUIET, _STYLE, _PATTERNS, attributes)


class _TimeScale:
    """Converts times to horizontal positions."""

    def __init__(self, duration_ms: float):
        self.duration_ms = max(duration_ms, 1e-3)
        self.ms_per_px = self.duration_ms / (_WIDTH - _LEFT - _RIGHT)

    def x_of(self, time_ms: float) -> float:
        return _LEFT + time_ms / self.ms_per_px


def _rows_of_trace(trace: StepTrace) -> list[_PictureRow]:
    decisions = [transfer for transfer in trace.transfers if transfer.is_decision]
    others = [transfer for transfer in trace.transfers if not transfer.is_decision]
    rows = [_PictureRow("forward, backward", trace.compute, _COMPUTE), *_transfer_rows(others)]
    if decisions:
        rows.append(_PictureRow("decision", transfers=decisions))
    return [*rows, _PictureRow("updates", trace.updates, _UPDATE)]


def _transfer_rows(transfers: Sequence[Transfer]) -> list[_PictureRow]:
    ordered = sorted(transfers, key=lambda each: (math.inf if each.fragment is None else each.fragment, each.begin_ms))
    share = max(1, math.ceil(len(ordered) / _MOST_TRANSFER_ROWS))
    groups = [ordered[start : start + share] for start in range(0, len(ordered), share)]
    return [
        _PictureRow(_label_of_transfers(group, start * share), transfers=group) for start, group in enumerate(groups)
    ]


def _label_of_transfers(group, position):
    if all(transfer.fragment is not None for transfer in group):
        kind, first, last = "fragment", group[0].fragment, group[-1].fragment
    else:
        kind, first, last = "transfer", position, position + len(group) - 1
    return f"{kind} {first}" if first == last else f"{kind}s {first}\N{EN DASH}{last}"


def _draw_panel(
    trace: StepTrace, rows: Sequence[_PictureRow], scale: _TimeScale, top: float, heading: str
) -> list[str]:
    first, bottom = top + _ABOVE, top + _ABOVE + _PITCH * len(rows)
    return [
        svg_text(18, top + 28, heading, "title"),
        svg_text(18, top + 49, _subtitle(trace), "quiet"),
        *_draw_grid(scale, first, bottom),
        *(part for number, row in enumerate(rows) for part in _draw_row(row.label, first + _PITCH * number)),
        *_draw_exposed_tail(trace, scale, first, bottom),
        *(part for number, row in enumerate(rows) for part in _draw_bars(row, scale, first + _PITCH * number)),
        *_draw_marks(trace, scale, first, bottom),
    ]


def _subtitle(trace):
    share = 100 * trace.exposed_ms / trace.duration_ms if trace.duration_ms else 0.0
    return (
        f"{_format_ms(trace.duration_ms)}, of which {_format_ms(trace.exposed_ms)} ({share:.0f} %) exposed tail: the "
        "backward pass is over, and nothing is computed until the transfers end"
    )


def _draw_grid(scale, first, bottom):
    parts = []
    ticks = round_tick_values(0.0, scale.duration_ms, 10)
    for number, tick in enumerate(ticks):
        x = scale.x_of(tick)
        parts.append(f'<line x1="{x:.2f}" y1="{first}" x2="{x:.2f}" y2="{bottom}" stroke="{GRID}"/>')
        unit = " ms" if number == len(ticks) - 1 else ""
        parts.append(svg_text(x, bottom + 18, f"{tick:g}{unit}", "quiet small", "middle"))
    return parts


def _draw_row(label, top):
    y = top + (_PITCH - _BAR) / 2
    return [
        f'<g class="row"><title>{escape(label)}</title>'
        f'<rect x="{_LEFT}" y="{y:g}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_BAR}" fill="{_ROW}" rx="2"/></g>',
        svg_text(_LEFT - 12, top + _PITCH / 2 + 4.5, label, "", "end"),
    ]


def _draw_exposed_tail(trace, scale, top, bottom):
    """Draws the exposed tail, the waits after the backward pass, as one path, since there can be many short waits."""
    intervals = trace.exposed_intervals
    if not intervals:
        return []
    path = "".join(
        f"M{scale.x_of(begin):.3f} {top:g}h{(end - begin) / scale.ms_per_px:.3f}V{bottom:g}H{scale.x_of(begin):.3f}z"
        for begin, end in intervals
    )
    text = f"exposed tail: {_format_ms(trace.exposed_ms)}"
    return [f'<path class="exposed" d="{path}" fill="{_EXPOSED}" fill-opacity="0.2"><title>{text}</title></path>']


def _draw_bars(row: _PictureRow, scale: _TimeScale, top: float) -> list[str]:
    kind = "update" if row.color == _UPDATE else "compute"
    # Details that are too fine to see are joined, as they would only enlarge the file.
    parts = [
        _draw_bar(scale, interval, top, kind, row.color)
        for interval in merge_intervals(row.intervals, gap=_FINEST_PX * scale.ms_per_px)
    ]
    for transfer in row.transfers:
        waiting = _format_ms(transfer.wire_ms - transfer.begin_ms)
        text = f"{transfer.name}: waits {waiting}, then {_format_wire_time(transfer)}"
        pattern = "url(#decision-waits)" if transfer.is_decision else "url(#waits)"
        parts.append(_draw_bar(scale, (transfer.begin_ms, transfer.wire_ms), top, "wait", pattern, text))
    for transfer in row.transfers:
        text = f"{transfer.name}: {_format_wire_time(transfer)}"
        color = _DECISION if transfer.is_decision else _WIRE
        parts.append(_draw_bar(scale, (transfer.wire_ms, transfer.end_ms), top, "wire", color, text))
    return parts


def _format_wire_time(transfer):
    return f"{_format_ms(transfer.end_ms - transfer.wire_ms)} on the wire"


def _draw_backward_end(trace, scale, first, bottom, text):
    x = scale.x_of(trace.backward_end_ms)
    return [
        f'<line class="backward-end" x1="{x:.2f}" y1="{first - 6}" x2="{x:.2f}" y2="{bottom}" stroke="{INK}" '
        'stroke-dasharray="4 3"/>',
        svg_text(x - 6, first - 8, text, "small", "end") if x > _LEFT + 130 else "",
    ]


def _draw_marks(trace, scale, first, bottom):
    x = scale.x_of(trace.backward_end_ms)
    parts = _draw_backward_end(trace, scale, first, bottom, "backward pass ends")
    if trace.exposed_intervals:
        text = f"exposed tail {_format_ms(trace.exposed_ms)}"
        is_late = x > _WIDTH - 170
        parts.append(svg_text(x + 6, first - 8, text, "small tail") if not is_late else "")
        parts.append(svg_text(x - 130, first - 8, f"{text}, ", "small tail", "end") if is_late else "")
    end = scale.x_of(trace.duration_ms)
    parts.append(f'<line x1="{end:.2f}" y1="{first}" x2="{end:.2f}" y2="{bottom}" stroke="{_QUIET}"/>')
    return parts


def _draw_legend(top: float) -> list[str]:
    entries = (
        (_COMPUTE, 1.0, "computes"),
        ("url(#waits)", 1.0, "waits for its turn or another rank"),
        (_WIRE, 1.0, "on the wire"),
        (_DECISION, 1.0, "joint decision"),
        (_UPDATE, 1.0, "updates, copies of gradients"),
        (_EXPOSED, 0.2, "exposed tail"),
    )
    parts, x = [], float(_LEFT)
    for color, opacity, label in entries:
        parts.append(
            f'<rect x="{x:g}" y="{top}" width="16" height="12" rx="2" fill="{color}" fill-opacity="{opacity}"/>'
        )
        parts.append(svg_text(x + 22, top + 10.5, label, "small"))
        x += 22 + 6.2 * len(label) + 20
    return parts


def _draw_bar(scale, interval: Interval, top: float, kind: str, color: str, text: str = "") -> str:
    begin, end = interval
    y = top + (_PITCH - _BAR) / 2
    if end <= begin:
        return ""
    look = ' stroke="white" stroke-width="0.7"' if kind == "wire" else ""
    title = f"<title>{escape(text)}</title>" if text else ""
    return (
        f'<rect class="{kind}" x="{scale.x_of(begin):.3f}" y="{y:g}" width="{(end - begin) / scale.ms_per_px:.3f}" '
        f'height="{_BAR}" fill="{color}"{look}>{title}</rect>'
    )


def _format_ms(time_ms: float) -> str:
    return f"{time_ms:.1f} ms" if time_ms >= 1 else f"{time_ms:.2f} ms"
