"""Renders a comparison as an HTML page: verdicts, losses in their band, the first operator that differs, tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape

import numpy as np

from npu_bridge.reporting.page import axes
from npu_bridge.reporting.page.chart import LEFT, RIGHT, EndLabel, draw_figure, svg_path_data
from npu_bridge.reporting.page.document import html_page, html_section, html_table
from npu_run.compare.band import LossBand, align_losses
from npu_run.compare.folders import FolderComparison
from npu_run.compare.losses import Losses
from npu_run.compare.tensors import TensorComparison
from npu_run.compare.verdict import WORDS, Verdict

_TOP, _BOTTOM = 14, 264
_MOST_PLACES = 800
_MOST_ROWS = 40
_STYLE = """<style>
.verdict b { display: inline-block; padding: 1px 10px; margin-right: 8px; border-radius: 99px; color: var(--sheet);
  background: var(--quiet); } .verdict b.yes { background: var(--good); } .verdict b.no { background: var(--bad); }
.of-a { --here: var(--a); } .of-b { --here: var(--b); } .left { stroke: var(--bad); stroke-dasharray: 4 3; }
.node rect { fill: var(--page); stroke: var(--quiet); stroke-width: 1.5; } .node.no rect { stroke: var(--bad);
  stroke-width: 3; } .node.yes rect { stroke: var(--good); } .edge { stroke: var(--quiet); fill: none; }
svg .node text { fill: var(--ink); }
.node.unknown rect { stroke-dasharray: 5 4; } path.line.of-a { stroke-width: 5; opacity: .55; }
td:nth-child(-n+2) { overflow-wrap: anywhere; min-width: 11em; }
</style>"""


def render_comparison(comparison: FolderComparison) -> str:
    """Returns the text of the HTML page, which needs no other file, no network and no scripts."""
    a, b = (os.path.basename(os.path.abspath(path)) or path for path in (comparison.a, comparison.b))
    title = f"{b} against {a}: {WORDS[comparison.is_inside]}"
    parts = [
        _STYLE,
        f'<p class="quiet">A is {escape(comparison.a)}, B is {escape(comparison.b)}.</p>',
        html_section("", "".join(_verdict_html(verdict) for verdict in comparison.verdicts)),
    ]
    kinds = {verdict.kind: verdict for verdict in comparison.verdicts}
    if comparison.losses is not None:
        parts.append(html_section("", _draw_losses(*comparison.losses, comparison.band, kinds["losses"])))
    if comparison.tensors is not None:
        parts += [_draw_operators(comparison.tensors), _tensor_table(comparison.tensors)]
    if comparison.variables:
        parts.append(_variable_table(comparison))
    notes = [*comparison.notes, *(note for verdict in comparison.verdicts for note in verdict.notes)]
    if notes:
        parts.append(html_section("Notes", "".join(f"<p>{escape(note)}</p>" for note in notes)))
    return html_page(title, "\n".join(parts), "npu-run compare")


def _verdict_html(verdict: Verdict) -> str:
    kind = {True: "yes", False: "no", None: ""}[verdict.is_inside]
    words = f"{verdict.kind}: {WORDS[verdict.is_inside]}"
    return f'<p class="verdict"><b class="{kind}">{escape(words)}</b>{escape(verdict.sentence)}</p>'


def _draw_losses(a: Sequence[Losses], b: Sequence[Losses], band: LossBand | None, verdict: Verdict) -> str:
    """Draws the losses of A and B over the steps, and the band (if there is one) three spreads wide."""
    curves = [("of-a", "A", *_mean_of_repeats(a)), ("of-b", "B", *_mean_of_repeats(b))]
    known = np.concatenate([values[np.isfinite(values)] for *_, values in curves])
    if not len(known):
        return "<p>No loss is finite.</p>"
    steps = np.concatenate([curve[2] for curve in curves])
    x = axes.make_axis_without_margins(int(steps.min()), int(steps.max()), LEFT, RIGHT)
    y = axes.make_loss_axis([float(known.min()), float(known.max())], _BOTTOM, _TOP)
    body, legend = [], [("of-a line", "A"), ("of-b line", "B")]
    if band is not None:
        at = _choose_drawn_places(len(band.steps))
        places, middle, half = band.steps[at], band.center[at], 3 * band.spread[at]
        edge = [(x.position_of(s), y.position_of(v)) for s, v in zip(places, middle + half)]
        edge += [(x.position_of(s), y.position_of(v)) for s, v in zip(places[::-1], (middle - half)[::-1])]
        owner = "of-a" if len(a) > 1 else "of-b"
        body.append(f'<path class="band {owner}" d="{svg_path_data(edge)}Z"/>')
        legend.append((f"{owner} line", f"band: three spreads of {band.repeats} repeats"))
    for kind, _, of_steps, values in curves:
        at = _choose_drawn_places(len(of_steps))
        points = [(x.position_of(s), y.position_of(v)) for s, v in zip(of_steps[at], values[at]) if np.isfinite(v)]
        body.append(f'<path class="line {kind}" d="{svg_path_data(points)}"/>' if points else "")
    left = verdict.facts.get("step")
    if left is not None:
        body.append(
            f'<path class="left" d="M{x.position_of(left):.1f} {y.end}V{y.start}"/>'
            f'<text x="{x.position_of(left) + 6:.1f}" y="{y.end + 10}">step {left}</text>'
        )
    ends = []
    for kind, name, _, values in curves:
        finite = values[np.isfinite(values)]
        ends += [EndLabel(float(finite[-1]), f"{name} {finite[-1]:.4g}", kind=kind)] if len(finite) else []
    return draw_figure("losses", "Loss", int(steps.max()), x, y, body, ends, legend=legend)


def _mean_of_repeats(runs: Sequence[Losses]) -> tuple[np.ndarray, np.ndarray]:
    steps, losses = align_losses(runs)
    return (steps, losses.mean(axis=0)) if len(steps) else (runs[0].steps, runs[0].values)


def _choose_drawn_places(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_PLACES)).astype(int)) if count else np.arange(0)


def _draw_operators(tensors: TensorComparison) -> str:
    """Draws the first operator out of tolerance, with the operators before and after it."""
    if tensors.first is None:
        return ""
    name = tensors.first.place.op
    columns = [list(tensors.inputs.items())[:6], [(name, False)], list(tensors.readers.items())[:6]]
    tall = max(len(column) for column in columns)
    height, places = 20 + 46 * tall, {}
    for number, column in enumerate(columns):
        for row, (op, is_inside) in enumerate(column):
            places[number, op] = (10 + 335 * number, 20 + 46 * (row + (tall - len(column)) / 2), is_inside)
    x, y, _ = places[1, name]
    parts = []
    for (number, _), (left, top, _) in places.items():
        if number != 1:
            start, end = ((left + 310, top), (x, y)) if number == 0 else ((x + 310, y), (left, top))
            middle = (start[0] + end[0]) / 2
            path = f"M{start[0]} {start[1] + 16}C{middle} {start[1] + 16} {middle} {end[1] + 16} {end[0]} {end[1] + 16}"
            parts.append(f'<path class="edge" d="{path}"/>')
    for (_, op), (left, top, is_inside) in places.items():
        kind = {True: "yes", False: "no", None: "unknown"}[is_inside]
        shown = op if len(op) <= 44 else f"...{op[-41:]}"
        state = "not compared" if is_inside is None else WORDS[is_inside]
        parts.append(
            f'<g class="node {kind}"><title>{escape(op)}: {state}</title>'
            f'<rect x="{left}" y="{top:.0f}" width="310" height="32" rx="6"/>'
            f'<text x="{left + 155}" y="{top + 20:.0f}" text-anchor="middle">{escape(shown)}</text></g>'
        )
    picture = (
        f'<div class="scroll"><svg viewBox="0 0 1000 {height}" role="img" data-name="graph" '
        f'aria-label="{escape(name)} between its inputs and what reads it">{"".join(parts)}</svg></div>'
    )
    key = "Bold: the first out of tolerance. Dashed: not compared."
    return html_section(f"Where it begins, at step {tensors.key.step}", f'{picture}<p class="quiet">{key}</p>')


def _tensor_table(comparison: TensorComparison) -> str:
    at = comparison.rows.index(comparison.first) if comparison.first in comparison.rows else 0
    begin = max(0, at - 5)
    rows = []
    for row in comparison.rows[begin : begin + _MOST_ROWS]:
        place, one = row.place, row.agreement
        name = f"{place.op} ({place.side} {place.slot})" if place.side == "input" or place.slot else place.op
        name += f" = {row.other.op} [{row.how}]" if row.how else ""
        if one is None:
            rows.append([name, row.type, row.problem, "", "", "", ""])
            continue
        numbers = [f"{one.largest_error:.2g}", f"{one.largest_relative:.2g}"]
        odd = f"{one.not_finite[0]} / {one.not_finite[1]}" if any(one.not_finite) else ""
        state = "noise" if row.is_noise else f"{WORDS[one.is_inside]}{f', not finite: {odd}' if odd else ''}"
        rows.append([name, row.type, state, f"{one.cosine:.8f}", *numbers, f"{100 * one.mismatches:.3g} %"])
    header = ("operator", "type", "", "cosine", "largest error", "largest relative", "beyond")
    said = f"{len(rows)} of {len(comparison.rows)} tensors in the order of execution"
    return html_section("Tensors", f'<p class="quiet">{said}.</p>{html_table(header, rows)}')


def _variable_table(comparison: FolderComparison) -> str:
    rows = []
    for one in (comparison.variables or [])[:_MOST_ROWS]:
        cosine = "" if one.cosine is None else f"{one.cosine:.6f}"
        z = "" if one.z is None else f"{one.z:.3g}"
        rows.append([one.name, f"{one.distance:.3g}", f"{one.largest:.3g}", z, f"{one.gain:.6g}", cosine])
    header = ("variable or slot", "distance / norm", "largest error", "spreads", "B / A", "cosine of updates")
    step = comparison.variables[0].step if comparison.variables else ""
    return html_section(f"Checkpoints at step {step}, worst first", html_table(header, rows))
