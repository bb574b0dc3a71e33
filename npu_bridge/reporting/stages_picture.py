"""Draws the stages of gradients as SVG, one below the other, with the bytes that each rank sends in a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from npu_bridge.base.errors import shortened
from npu_bridge.reporting.picture_style import GRID, QUIET, svg_picture, svg_text

_LOCAL, _SENT, _DECISION, _REDUCED = "#0f8a72", "#1f6feb", "#b7791f", "#7048c6"
_COLORS = {"scale": _LOCAL, "accumulate": _LOCAL, "local clip": _LOCAL, "reduce": _SENT, "verdict": _DECISION}
_WIDTH, _LINE, _CARD, _CARD_WIDTH, _BAR, _BAR_WIDTH = 1120, 172, 200, 560, 800, 292
_ABOVE, _PITCH, _CARD_HEIGHT, _BELOW = 78, 62, 48, 66
_LONGEST_TEXT = 64  # characters of 13 px that a card has room for


def draw_stages(stages: Sequence[Any]) -> str:
    """Draws gradient stages in their order.

    Args:
      stages: the stages: objects with `place`, `name`, `arguments`, `needs`, `gives` and `sends`, as in
        `gradients.explanation`.
    Returns:
      The text of an SVG file. Elements carry classes: `stop` (with the stage's name as `data-stage`), `before`, `sent`.
    """
    bottom = _ABOVE + _PITCH * (len(stages) + 1)
    most = max([byte for stop in stages if stop.sends for byte in stop.sends if byte is not None], default=0.0)
    body = [
        svg_text(18, 30, "From the backward pass to the update", "title"),
        svg_text(_BAR, 30, "bytes sent per parameter and batch", "name") if most else "",
        svg_text(_BAR, 49, "by each rank: light without this stage, dark with it", "quiet small") if most else "",
        f'<line x1="{_LINE}" y1="{_ABOVE}" x2="{_LINE}" y2="{bottom}" stroke="{GRID}" stroke-width="4"/>',
        *_draw_endpoint(_ABOVE, "backward pass"),
        *(
            part
            for number, stop in enumerate(stages)
            for part in _draw_stage(stop, _ABOVE + _PITCH * (number + 0.55), most)
        ),
        *_draw_endpoint(bottom, "update"),
    ]
    height = bottom + _BELOW / 2
    return svg_picture(body, _WIDTH, height, QUIET, ".name { font-weight: 600; }")


def _draw_endpoint(y, label):
    return [f'<circle cx="{_LINE}" cy="{y:g}" r="5" fill="{QUIET}"/>', svg_text(_CARD, y + 4.5, label, "quiet")]


def _draw_stage(stage, top, most_bytes):
    color = _COLORS.get(stage.place, _REDUCED)
    middle = top + _CARD_HEIGHT / 2
    links = [f"needs {need}" for need in stage.needs] + [f"gives {gift}" for gift in stage.gives]
    first, second = (top + 20, top + 38) if links else (middle + 4.5, 0)
    room = _LONGEST_TEXT - len(stage.name)
    return [
        f'<g class="stop" data-stage={quoteattr(stage.name)}>'
        f"<title>{escape(f'{stage.name}({stage.arguments})')}</title>"
        f'<rect x="{_CARD}" y="{top:g}" width="{_CARD_WIDTH}" height="{_CARD_HEIGHT}" rx="4" fill="{color}" '
        f'fill-opacity="0.07"/><rect x="{_CARD}" y="{top:g}" width="4" height="{_CARD_HEIGHT}" fill="{color}"/></g>',
        svg_text(_LINE - 18, middle + 4.5, stage.place, "quiet", "end"),
        f'<circle cx="{_LINE}" cy="{middle:g}" r="7" fill="{color}" stroke="white" stroke-width="2"/>',
        f'<text x="{_CARD + 18}" y="{first:g}"><tspan class="name">{escape(stage.name)}</tspan>'
        f'<tspan dx="10">{escape(shortened(stage.arguments, room))}</tspan></text>',
        svg_text(_CARD + 18, second, ", ".join(links), "quiet small") if links else "",
        *(_draw_bars(stage.sends, top, most_bytes) if stage.sends else ()),
    ]


def _draw_bars(sent_bytes, top, most_bytes):
    """Draws a light bar for the bytes sent without the stage, and a full bar for the bytes sent with the stage."""
    before, after = sent_bytes
    y, parts = top + 8, []
    for kind, sent, opacity in (("before", before, 0.25), ("sent", after, 1.0)):
        width = 0.0 if sent is None else max(1.5, sent / most_bytes * _BAR_WIDTH)
        parts.append(
            f'<rect class="{kind}" x="{_BAR}" y="{y:g}" width="{width:.2f}" height="14" rx="2" fill="{_SENT}" '
            f'fill-opacity="{opacity}"/>'
        )
    if after is None:
        text = f"{before:.3g} before; with this stage it depends on the training"
    else:
        text = f"{after:.3g}" if after == before else f"{after:.3g} instead of {before:.3g}"
    return [*parts, svg_text(_BAR, top + 38, text, "small")]
