"""Holds the style sheet of the page: light or dark colours, whichever the reader's system sets, and print rules."""

from __future__ import annotations

from npu_bridge.reporting.picture_style import COLOURS, GRID, INK


def _css_colours(shade_number: int) -> str:
    return " ".join(f"--{name}: {shades[shade_number]};" for name, shades in COLOURS.items())


_LIGHT = f"--ink: {INK}; --quiet: #5f6c7b; --grid: {GRID}; --page: #f5f7fa; --sheet: #fff; {_css_colours(0)}"
_DARK = f"--ink: #e3e8ee; --quiet: #9aa7b6; --grid: #2b3440; --page: #12161c; --sheet: #1a2029; {_css_colours(1)}"
STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
@media print {{ :root {{ color-scheme: light; {_css_colours(0)} --ink: #000; --quiet: #444; --grid: #ccc; --page: #fff;
  --sheet: #fff; }} }}
"""
STYLE += """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 10px; }
p { margin: 0 0 10px; } .quiet { color: var(--quiet); }
section { background: var(--sheet); border: 1px solid var(--grid); border-radius: 10px; padding: 16px 18px;
  margin-top: 16px; }
dl.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0 0; }
.tiles div { flex: 1 1 108px; background: var(--sheet); border: 1px solid var(--grid); border-radius: 10px;
  padding: 10px 14px; }
.tiles dt { color: var(--quiet); font-size: 13px; } .tiles dd { margin: 0; font-size: 20px; font-weight: 600;
  white-space: nowrap; }
.tiles dd small { display: block; font-size: 13px; font-weight: 400; line-height: 1.3; white-space: normal;
  color: var(--quiet); }
.failure { border-color: var(--bad); border-left-width: 5px; } .failure h2 { color: var(--bad); }
.failure pre { margin-bottom: 10px; }
figure { margin: 0 0 14px; } figure:last-child { margin: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: baseline; }
.key { color: var(--quiet); font-size: 13px; }
.key::before { content: ""; display: inline-block; width: 14px; margin-right: 6px; vertical-align: middle;
  border-top: 3px solid var(--here); }
.key.skip::before { border: 5px solid transparent; border-top: 8px solid var(--skip); border-bottom: 0; width: 0; }
.key.lowered::before { height: 12px; border: 0; background: var(--lowered); opacity: .35; }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 620px; height: auto; outline-offset: -2px; }
svg text { font-size: 12px; fill: var(--quiet); font-variant-numeric: tabular-nums; }
svg .last { fill: var(--here); font-weight: 700; font-size: 13px; }
svg .note { fill: var(--quiet); font-weight: 400; font-size: 11px; }
path.evaluation { stroke: var(--evaluation); stroke-width: 1.4; stroke-dasharray: 5 3; fill: none; }
circle.evaluation { fill: var(--sheet); stroke: var(--evaluation); stroke-width: 2; }
.key.evaluation::before { width: 9px; height: 9px; border: 2px solid var(--evaluation); border-radius: 50%; }
.chart { --here: var(--loss); } .scale { --here: var(--scale); } .skipped { --here: var(--skip); }
.evaluated { --here: var(--evaluation); } .rate { --here: var(--rate); } .speed { --here: var(--speed); }
.grid { stroke: var(--grid); fill: none; }
.line { stroke: var(--here); stroke-width: 2.2; fill: none; stroke-linejoin: round; stroke-linecap: round; }
.raw { stroke: var(--here); stroke-width: 1; opacity: .3; fill: none; stroke-linejoin: round; }
.band { fill: var(--here); fill-opacity: .2; stroke: var(--here); stroke-opacity: .4; stroke-width: .8; }
.dot { fill: var(--here); }
path.skip { fill: var(--skip); } .nan { stroke: var(--skip); stroke-width: 1.6; fill: none; }
rect.lowered { fill: var(--lowered); opacity: .2; }
.restart { stroke: var(--quiet); stroke-dasharray: 4 3; fill: none; }
.pointer { stroke: var(--ink); fill: none; opacity: .6; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--grid);
  overflow-wrap: break-word; max-width: 30em; }
th { color: var(--quiet); font-weight: 600; font-size: 13px; white-space: nowrap; } tr:last-child td { border: 0; }
th.number, td.number { text-align: right; white-space: nowrap; }
pre { margin: 0; padding: 10px 12px; background: var(--page); border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
summary { cursor: pointer; font-weight: 600; font-size: 17px; }
details[open] summary { margin-bottom: 10px; }
img.timeline { display: block; width: 100%; background: #fff; border-radius: 6px; }
#tip { position: fixed; z-index: 1; pointer-events: none; background: var(--sheet); color: var(--ink);
  border: 1px solid var(--quiet); border-radius: 6px; padding: 6px 10px; font-size: 13px; white-space: pre;
  font-variant-numeric: tabular-nums; box-shadow: 0 3px 12px #0003; }
footer { margin-top: 18px; color: var(--quiet); font-size: 13px; }
@media (max-width: 600px) { main { padding: 16px 10px 32px; } section { padding: 12px; } svg text { font-size: 16px; }
  svg .last { font-size: 17px; } svg .note { font-size: 15px; } }
@media print {
  @page { margin: 14mm; }
  body { font-size: 11pt; } main { max-width: none; padding: 0; } #tip, .pointer { display: none; }
  section { border: 0; padding: 0; } figure, tr, .tiles div { break-inside: avoid; } h2 { break-after: avoid; }
  svg { min-width: 0; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
