"""Assembles the report page from its sections: summary, charts, command, options, ranks, timeline."""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from npu_bridge import __version__
from npu_bridge.base.files import write_atomically
from npu_bridge.base.terminal import escape_controls
from npu_bridge.reporting.history import Evaluation, History, StepRow
from npu_bridge.reporting.page.chart import LEFT, RIGHT, WIDTH, draw_charts, html_tiles
from npu_bridge.reporting.page.curves import Curves, StepBucket, make_curves
from npu_bridge.reporting.page.failure import describe_stop, render_failure
from npu_bridge.reporting.page.run_folder import RunFolder, Timeline, read_run_folder
from npu_bridge.reporting.page.script import SCRIPT
from npu_bridge.reporting.page.style import STYLE
from npu_bridge.reporting.progress_line import (
    format_duration,
    format_loss,
    format_rate,
    format_scale,
    format_secs,
    format_steps,
)
from npu_bridge.reporting.stragglers import list_slow_periods, time_share_lost_to_rank
from npu_bridge.reporting.summary import LAST_LOSS_STEPS, Summary, summarize

PAGE_FILE = "report.html"
_TABLE_ROWS = 20
_MOST_METRICS, _TIP_METRICS = 8, 4  # in the table of evaluations, and at the pointer
# A larger timeline is not put into the page.
_MOST_PICTURE_BYTES = 600_000
# The page makes no requests, whatever the names of a run contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_BEGINNING = (
    f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
)
PAGE_FILES = b"^" + re.escape(_BEGINNING.encode())  # how pages begin


def write_page(
    folder: str, page: str | None = None, timeline: str | None = None, history: History | None = None
) -> str:
    """Writes the page of a run folder; the file is never left incomplete.

    Args:
      folder: folder of a training, such as its `model_dir`.
      page: the file to write. None: `report.html` in the folder.
      timeline, history: as in `read_run_folder`.
    Returns:
      The path of the page.
    Raises:
      NoRunError: the folder has no steps.
      OSError: the page cannot be written, or a file of this name is not a page of this kind.
    """
    page = os.path.join(folder, PAGE_FILE) if page is None else page
    write_atomically(page, render_page(read_run_folder(folder, timeline, history)), PAGE_FILES)
    return page


def render_page(run: RunFolder) -> str:
    """Returns the text of the page, which needs no other file and no network."""
    curves, summary, failure = make_curves(run.history), summarize(run.history), run.facts.get("failure")
    name = run.facts.get("script") or os.path.basename(os.path.abspath(run.path))
    ending = ""
    if failure:  # the history can lack the last steps before it
        reached, ending = failure.get("step"), f", {describe_stop(failure)}"
        summary = summary._replace(steps=max(summary.steps, reached if isinstance(reached, int) else 0))
    title = f"{name}: {format_steps(summary.steps)}{ending}"
    sections = [
        render_failure(failure, summary.ranks) if failure else "",
        html_section("", "".join(draw_charts(curves)) + _curve_notes(curves, summary)) if curves.buckets else "",
        _evaluations_section(run.history),
        _command_section(run),
        _options_section(run),
        _ranks_section(run, summary),
        _slow_ranks_section(run.history),
        _timeline_section(run.timeline),
        _environment_section(run),
        _numbers_section(curves) if curves.buckets else "",
    ]
    body = f"{_summary_section(run, summary)}\n{''.join(filter(None, sections))}"
    scripts = ""
    if curves.buckets:
        scripts = (
            f'<div id="tip" hidden></div>\n<script type="application/json" id="data">{_script_data(curves)}</script>\n'
            f"<script>{SCRIPT}</script>\n"
        )
    return html_page(title, body, "npu-run report", scripts)


def html_page(title: str, body: str, command: str, scripts: str = "") -> str:
    """Returns an HTML page in the style of reports, which needs no other file.

    Control characters are made visible, as they are not valid in HTML.

    Args:
      title: title of the page, as text.
      body, scripts: HTML; scripts come after the body.
      command: the command that makes such pages, for the footer.
    """
    return escape_controls(
        f'{_BEGINNING}<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        f'<link rel="icon" href="data:,">\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n'
        f"<h1>{escape(title)}</h1>\n{body}"
        f"<footer>Made by npu_bridge {escape(__version__)} with <code>{escape(command)}</code>. This page needs no "
        f"other file.</footer>\n</main>\n{scripts}</body>\n</html>\n"
    )


def _summary_section(run: RunFolder, summary: Summary) -> str:
    rows, starts, facts = run.history.rows, run.history.starts, run.history.facts
    said = []
    if rows:
        began = min(entry.time for entry in run.history.entries)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(rows[-1].time))
        said += [f"last step {when}", f"{format_duration(max(rows[-1].time - began, 0))} from the first start to it"]
    if len(starts) > 1:
        said.append(f"{len(starts)} sessions")
    facts_of_run = [("ranks", str(summary.ranks), ""), ("global step", str(summary.steps), "")]
    facts_of_run += _loss_tile(rows, summary)
    facts_of_run.append(("skipped", str(summary.skipped_steps), "step" if summary.skipped_steps == 1 else "steps"))
    if summary.loss_scale is not None:
        facts_of_run.append(("loss scale", format_scale(summary.loss_scale), ""))
    samples, ranks = facts.samples_per_step, summary.ranks
    if summary.steps_per_sec:
        pace = f", {format_rate(samples * summary.steps_per_sec)} samples/s" if samples else ""
        facts_of_run.append(("speed", format_rate(summary.steps_per_sec), f"steps/s{pace}"))
    if samples:
        facts_of_run.append(
            ("batch", f"{samples:,}", f"samples, {samples // ranks:,} on each rank" if ranks > 1 else "samples")
        )
    if facts.parameters:
        facts_of_run.append(("trained parameters", f"{facts.parameters:,}", ""))
    return f'<p class="quiet">{escape(" | ".join(said))}</p>\n{html_tiles(facts_of_run)}'


def _loss_tile(rows: Sequence[StepRow], summary: Summary) -> list[tuple[str, str, str]]:
    """Returns a tile with the loss of the last step, which is the end of the curve, and the mean of the last losses."""
    known = [row for row in rows if row.loss is not None]
    last = known[-1].loss if known else None
    if last is None or summary.last_loss is None or summary.first_loss is None:
        return []
    label = "loss, last step" if known[-1] is rows[-1] else f"loss, step {known[-1].step}"
    counted = min(LAST_LOSS_STEPS, sum(not row.skipped for row in known) or len(known))
    mean = f"mean of the last {counted}: {format_loss(summary.last_loss)}, " if counted > 1 else ""
    return [(label, format_loss(last), f"{mean}first: {format_loss(summary.first_loss)}")]


def _curve_notes(curves: Curves, summary: Summary) -> str:
    said = [f"All curves are over training steps{', skipped ones included' if summary.skipped_steps else ''}."]
    if curves.restarts:
        said.append("At a dashed line the training resumed from a checkpoint.")
    if curves.steps_per_bucket > 1:
        size = curves.steps_per_bucket
        said.append(f"Each point covers {size} recorded steps; the band shows their lowest and highest values.")
    elif curves.buckets[-1].loss:
        said.append("The thin line shows the loss of each step, the thick one the trend.")
    return f'<p class="quiet">{" ".join(said)}</p>'


def _evaluations_section(history: History) -> str:
    done = history.evaluations
    if not done:
        return ""
    metrics = sorted({metric for each in done for metric in each.metrics}, key=lambda name: (name != "loss", name))
    metrics = metrics[:_MOST_METRICS]
    header = ["step", "name", *metrics, "batches", "time"]
    rows = [
        [
            *(f"{each.step:,}", each.name),
            *(format_loss(each.metrics[metric]) if metric in each.metrics else "" for metric in metrics),
            *("" if each.batches is None else f"{each.batches:,}", "" if each.secs is None else format_secs(each.secs)),
        ]
        for each in done[-_TABLE_ROWS:]
    ]
    used = [column for column in range(len(header)) if any(row[column] for row in rows)]
    shown = html_table(
        [header[column] for column in used], [[row[column] for column in used] for row in rows], numbers=True
    )
    left = len(done) - len(rows)
    note = f'<p class="quiet">The last {len(rows)} of {len(done)}.</p>' if left else ""
    return html_section("Evaluations", note + shown)


def _command_section(run: RunFolder) -> str:
    command = run.facts.get("command")
    if not command:
        return ""
    place = run.facts.get("folder")
    where = f'<p class="quiet">in {escape(str(place))}</p>' if place else ""
    return html_section("To repeat it", f"{where}<pre>{escape(str(command))}</pre>")


def _options_section(run: RunFolder) -> str:
    rows, parts = run.facts.get("options"), []
    if rows:
        parts.append(html_table(("option", "value", "default", "what it does here"), rows))
    elif rows is not None:
        parts.append("<p>Every option has its default.</p>")
    if run.facts.get("variables"):
        parts.append(html_table(("environment variable", "value", "what it does here"), run.facts["variables"]))
    return html_section("Options", "".join(parts)) if parts else ""


def _ranks_section(run: RunFolder, summary: Summary) -> str:
    known = [rank for rank in run.facts.get("ranks") or [] if rank and isinstance(rank, dict)]
    times = run.timeline.by_rank if run.timeline else {}
    facts = run.history.facts
    memory = {"peak memory": facts.memory_bytes or {}, "of the GPU": facts.gpu_memory_bytes or {}}
    if not known and not times and not any(memory.values()):
        return ""
    of_times = {"step": 0, "of it exposed tail": 1} if times else {}
    header = ["rank", *(name for name in ("host", "device", "cores", "process") if any(name in rank for rank in known))]
    header += [name for name in memory if memory[name]] + list(of_times)
    rows = []
    for number in range(max(len(known), summary.ranks, *(rank + 1 for rank in (*times, *memory["peak memory"])), 1)):
        rank = {"rank": number, **(known[number] if number < len(known) else {})}
        rank.update((name, _format_gigabytes(peaks.get(number))) for name, peaks in memory.items())
        rank.update((name, _format_ms(times.get(number, (None, None))[place])) for name, place in of_times.items())
        rows.append([str(rank.get(name, "")) for name in header])
    return html_section("Ranks", html_table(header, rows))


def _slow_ranks_section(history: History) -> str:
    """Returns the section with the latest comparison of the ranks, and the times when ranks were slow."""
    if not history.comparisons:
        return ""
    last = history.comparisons[-1]
    of_ranks = [[rank, _format_ms(own), f"{last.waiting[rank]:.0%}"] for rank, own in enumerate(last.own_ms)]
    said = f"In the steps before step {last.step:,}. Waiting is time spent on other ranks and on the network."
    body = html_table(("rank", "its own work in a step", "waiting"), of_ranks) + f'<p class="quiet">{said}</p>'
    rows = [
        [rank, f"{found.step:,}", "" if end is None else f"{end:,}", _format_ms(found.own_ms[rank])]
        + [f"{time_share_lost_to_rank(found, rank):.0%}"]
        for found, rank, end in list_slow_periods(history)
    ]
    slow = html_table(("slow rank", "from step", "to step", "its own work in a step", "the others wait for it"), rows)
    return html_section("Own work and waiting", body + (slow if rows else "<p>No rank was slow.</p>"))


def _format_gigabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f} GB"


def _format_ms(number: float | None) -> str:
    return "" if number is None else f"{number:.1f} ms"


def _timeline_section(timeline: Timeline | None) -> str:
    if timeline is None:
        return ""
    steps = f"{timeline.steps[0]} to {timeline.steps[-1]}" if len(timeline.steps) > 1 else str(timeline.steps[0])
    said = (
        f"Recorded steps {steps}. In the median step, {timeline.exposed_ms:.1f} ms of {timeline.step_ms:.1f} ms pass "
        f"after the backward pass while only gradients are under way."
    )
    picture = timeline.picture.encode("utf-8")
    if len(picture) > _MOST_PICTURE_BYTES:
        shown = '<p class="quiet">The picture, tail.svg, is too large for this page.</p>'
    else:  # as an image, so that scripts inside do not run
        source = base64.b64encode(picture).decode("ascii")
        shown = f'<img class="timeline" alt="Timeline of one step" src="data:image/svg+xml;base64,{source}">'
    return html_section("Timeline", f"<p>{escape(said)}</p>{shown}")


def _environment_section(run: RunFolder) -> str:
    rows = run.facts.get("environment")
    return html_section("Environment", html_table(("", ""), rows), is_folded=True) if rows else ""


def _numbers_section(curves: Curves) -> str:
    """Returns the section with the curves as a table of at most `_TABLE_ROWS` rows, including the last step."""
    buckets = curves.buckets
    size = -(-len(buckets) // _TABLE_ROWS)
    groups = [buckets[max(end - size, 0) : end] for end in range(len(buckets), 0, -size)][::-1]
    header = ("step", "loss", "lowest", "highest", "loss scale", "skipped")
    rows = [_make_number_row(group) for group in groups]
    return html_section("Numbers", html_table(header, rows, numbers=True), is_folded=True)


def _make_number_row(buckets: Sequence[StepBucket]) -> list[str]:
    losses = [bucket.loss for bucket in buckets if bucket.loss]
    scales = [bucket.loss_scale for bucket in buckets if bucket.loss_scale]
    return [
        str(buckets[-1].step),
        format_loss(losses[-1].mean) if losses else "",
        format_loss(min(loss.low for loss in losses)) if losses else "",
        format_loss(max(loss.high for loss in losses)) if losses else "",
        format_scale(scales[-1].low) if scales else "",
        str(sum(bucket.skipped for bucket in buckets)),
    ]


def _script_data(curves: Curves) -> str:
    """Returns the data for the page's script, as JSON that cannot close the HTML element around it."""
    rows = [
        [
            *(bucket.first, bucket.last, bucket.step),
            *(_read_rounded_attribute(bucket.loss, part) for part in ("low", "mean", "high")),
            *(_read_rounded_attribute(bucket.loss_scale, part) for part in ("low", "high")),
            *(
                _read_rounded_attribute(bucket.learning_rate, "mean"),
                bucket.skipped,
                bucket.not_finite,
                bucket.precision,
            ),
            bucket.recorded,
        ]
        for bucket in curves.buckets
    ]
    low = curves.buckets[0].first
    data = {
        "rows": rows,
        "speeds": [[speed.first, speed.last, float(f"{speed.steps_per_sec:.4g}")] for speed in curves.speeds],
        "evaluations": [[place, _describe_evaluation(each)] for place, each in curves.evaluations],
        **{"low": low, "high": max(curves.buckets[-1].last, low + 1)},
        **{"width": WIDTH, "left": LEFT, "right": RIGHT},
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _describe_evaluation(evaluation: Evaluation) -> str:
    """Describes an evaluation for a tooltip, which can be shown at a later step."""
    shown = [f"{name} {format_loss(number)}" for name, number in evaluation.metrics.items()][:_TIP_METRICS]
    what = f"evaluation {evaluation.name}".strip()
    return "\n  ".join([f"{what} at step {evaluation.step}", *shown])


def _read_rounded_attribute(range_or_none: Any, attribute: str) -> float | None:
    return None if range_or_none is None else float(f"{getattr(range_or_none, attribute):.6g}")


def html_section(title: str, body: str, is_folded: bool = False) -> str:
    """Returns a section as HTML; `body` is HTML, `title` is text."""
    if is_folded:
        return f"<section><details><summary>{escape(title)}</summary>{body}</details></section>\n"
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return f"<section>{heading}{body}</section>\n"


def html_table(header: Iterable[str], rows: Iterable[Sequence[Any]], numbers: bool = False) -> str:
    """Returns an HTML table of texts."""
    kind = ' class="number"' if numbers else ""
    heads = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name in header)
    lines = "".join(f"<tr>{''.join(f'<td{kind}>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    head = f"<thead><tr>{heads}</tr></thead>" if any(header) else ""
    return f'<div class="scroll"><table>{head}<tbody>{lines}</tbody></table></div>'
