"""Holds the colours and style of all pictures: of matplotlib, of SVG files and of the page."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from npu_bridge.base.files import new_file
from npu_bridge.reporting.errors import import_optional

INK = "#1f2933"
QUIET = "#8592a3"
GRID = "#e4e8ee"
# Each thing has one colour in pictures and on pages: in light and in dark mode.
COLOURS = {
    "loss": ("#1f6feb", "#6ba6ff"),
    "scale": ("#0f8a72", "#3fc7a8"),
    "skip": ("#d9480f", "#ff8a5c"),
    "rate": ("#7048c6", "#b197fc"),
    "speed": ("#b7791f", "#e0ac4f"),
    "lowered": ("#f0b429", "#b98a1e"),
    "evaluation": (INK, "#e3e8ee"),
    "good": ("#0b7a5e", "#3fc7a8"),
    "bad": ("#c2410c", "#ff8a5c"),
}
COLOURS["a"], COLOURS["b"] = COLOURS["loss"], ("#c2257a", "#ff7ab8")  # two runs
SOFTWARE = "npu_bridge"  # recorded in a PNG
PLAN_FILES = rb"^\x89PNG(.|\n)*tEXtSoftware\x00" + SOFTWARE.encode()  # how a picture of a plan begins
PICTURE_FILES = rb"^<svg [^>]*>\n<style>text \{ font-family: system-ui, 'Segoe UI', "  # how `svg_picture` begins


def new_figure(caller: str, height_inches: float) -> Any:
    """Makes a white figure ten inches wide, without pyplot, so that it needs neither global state nor a window system.

    Args:
      caller: the name of the caller, for the message of a `MissingExtraError`.
      height_inches: height of the figure.
    """
    log = logging.getLogger("matplotlib")
    level = log.level
    # matplotlib logs its first search for fonts, or a missing home, in the middle of a training.
    log.setLevel(max(level, logging.ERROR))
    try:
        figure_of = import_optional("matplotlib.figure", caller, "plot").Figure
    finally:
        log.setLevel(level)
    return figure_of(figsize=(10, height_inches), dpi=120, facecolor="white", layout="constrained")


def write_png(figure: Any, path: str, ours: bytes | None = None, **metadata: str) -> None:
    """Writes a matplotlib figure to a file, which appears when it is complete; `ours` as in `files.new_file`."""
    with new_file(path, "wb", ours) as file:
        figure.savefig(file, format="png", metadata=metadata)


def style_axis(axis) -> None:
    """Gives a matplotlib axis a light grid, and removes its frame at the top and on the right."""
    axis.grid(True, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.margins(x=0.01)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(QUIET)
    axis.tick_params(colors=INK, labelsize=9)
    axis.xaxis.label.set_color(INK)
    axis.yaxis.label.set_color(INK)


def svg_text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Returns a line of text for an SVG picture; `kind` holds its CSS classes."""
    return f'<text x="{x:.2f}" y="{y:g}" class={quoteattr(kind)} text-anchor="{anchor}">{escape(text)}</text>'


def svg_picture(
    parts: Iterable[str],
    width: float,
    height: float,
    quiet_colour: str,
    style: str,
    patterns: str = "",
    attributes: str = "",
) -> str:
    """Returns the text of an SVG file, made without a drawing package.

    Args:
      parts: the SVG elements; empty texts are left out.
      width, height: size in pixels.
      quiet_colour: colour of texts of the class `quiet_colour`; there are also the classes `small` and `title`.
      style: CSS of further classes.
      patterns: pattern elements to which other elements refer.
      attributes: attributes of the picture as a whole.
    """
    body = "\n".join(filter(None, parts))
    defined = f"<defs>{patterns}</defs>\n" if patterns else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" '
        f'height="{height:g}"{attributes}>\n'
        "<style>text { font-family: system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; font-size: 13px; "
        f"fill: {INK}; }} .quiet {{ fill: {quiet_colour}; }} .small {{ font-size: 12px; }} "
        f".title {{ font-size: 17px; font-weight: 600; }} {style}</style>\n{defined}"
        f'<rect width="{width}" height="{height:g}" fill="white"/>\n{body}\n</svg>\n'
    )
