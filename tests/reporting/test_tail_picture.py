"""The picture of a step: well-formed, to scale, and the shaded part is the exposed tail."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_bridge.reporting.step_trace import StepTrace, Transfer
from npu_bridge.reporting.tail_picture import compare, draw_overlapping_steps, draw_step

SVG = "{http://www.w3.org/2000/svg}"
SUBPATH = re.compile(r"M([\d.]+) [\d.]+h([\d.]+)V")


def step(transfers=2, duration_ms=40.0, rank=0):
    """A backward pass of 10 ms, then fragments of 5 ms with 1 ms of updates behind each."""
    sent = tuple(
        Transfer(f"opt_fragment_{number}", 8.0 + 5 * number, 10.0 + 5 * number, 14.0 + 5 * number, number)
        for number in range(transfers)
    )
    decision = Transfer("opt<&>decision", 10.0, 11.0, 12.0, None, True)
    updates = tuple((14.0 + 5 * number, 15.0 + 5 * number) for number in range(transfers))
    return StepTrace(21, rank, 1.0, duration_ms, 10.0, ((0.0, 10.0),), updates, (*sent, decision))


def parsed(text):
    return ElementTree.fromstring(text)


def elements(text, kind):
    return [element for element in parsed(text).iter() if element.get("class") == kind]


def texts(text):
    return [element.text for element in parsed(text).iter(f"{SVG}text")]


def shaded_ms(text):
    per_px = float(parsed(text).get("data-ms-per-px"))
    widths = [float(width) for path in elements(text, "exposed") for _, width in SUBPATH.findall(path.get("d"))]
    return sum(widths) * per_px


def test_every_part_has_its_row():
    rows = [group.find(f"{SVG}title").text for group in elements(draw_step(step()), "row")]
    assert rows == ["forward, backward", "fragment 0", "fragment 1", "decision", "updates"]


def test_heading_tells_step_rank_and_tail():
    said = texts(draw_step(step(rank=1), ranks=4))
    assert "Step 21, rank 1 of 4" in said
    assert f"exposed tail {step().exposed_ms:.1f} ms" in said
    assert any(text.startswith("40.0 ms, of which 8.0 ms (20 %) exposed") for text in said)


def test_bars_are_to_scale():
    text = draw_step(step())
    per_px = float(parsed(text).get("data-ms-per-px"))
    assert [float(bar.get("width")) * per_px for bar in elements(text, "wire")] == pytest.approx([4, 4, 1], rel=1e-3)
    assert [float(bar.get("width")) * per_px for bar in elements(text, "wait")] == pytest.approx([2, 2, 1], rel=1e-3)
    (end,) = elements(text, "backward-end")
    (compute,) = elements(text, "compute")
    assert float(end.get("x1")) == pytest.approx(float(compute.get("x")) + float(compute.get("width")), abs=0.01)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 90), st.floats(0.1, 30)), max_size=5),
    st.lists(st.tuples(st.floats(0, 90), st.floats(0.1, 10)), max_size=5),
    st.floats(0, 100),
)
def test_what_is_shaded_is_the_exposed_tail(transfers, updates, backward_end):
    sent = tuple(
        Transfer(f"t{number}", begin, begin, min(100.0, begin + length))
        for number, (begin, length) in enumerate(transfers)
    )
    changed = tuple((begin, min(100.0, begin + length)) for begin, length in updates)
    trace = StepTrace(0, 0, 0.0, 100.0, backward_end, ((0.0, backward_end),), changed, sent)
    assert shaded_ms(draw_step(trace)) == pytest.approx(trace.exposed_ms, abs=0.005)


def test_many_fragments_share_rows_and_none_is_lost():
    text = draw_step(step(transfers=100, duration_ms=520.0))
    labels = [group.find(f"{SVG}title").text for group in elements(text, "row")]
    assert len(labels) <= 20
    assert labels[1] == "fragments 0\N{EN DASH}6"
    assert labels[-3].endswith("99")
    assert len(elements(text, "wire")) == 101


@pytest.mark.parametrize("duration_ms", [0.0, 0.003, 1.0, 99.9, 12345.6])
def test_the_axis_has_a_few_round_ticks(duration_ms):
    trace = StepTrace(0, 0, 0.0, duration_ms, duration_ms, ((0.0, duration_ms),), (), ())
    ticks = [text.removesuffix(" ms") for text in texts(draw_step(trace)) if re.fullmatch(r"[\d.e+-]+( ms)?", text)]
    assert 5 <= len(ticks) <= 12
    assert [float(tick) for tick in ticks][0] == 0
    assert elements(draw_step(trace), "exposed") == []


def test_two_steps_are_compared_on_one_scale():
    before, after = step(duration_ms=80.0), step(duration_ms=40.0)
    text = compare(before, after, ("tailing off", "tailing on"))
    said = texts(text)
    assert "tailing off: step 21, rank 0" in said
    assert "tailing on: step 21, rank 0" in said
    first, second = elements(text, "compute")
    assert first.get("width") == second.get("width")
    assert shaded_ms(text) == pytest.approx(before.exposed_ms + after.exposed_ms, abs=0.01)


def test_overlapping_steps_are_drawn_on_one_clock():
    """Steps that begin every 20 ms, and send three times 4 ms from 10 to 24 ms of their time."""
    steps = [dataclasses.replace(step(3), step=30 + number, start_secs=1.0 + number / 50) for number in range(4)]
    drawn = draw_overlapping_steps(steps, ranks=2)
    assert texts(drawn)[:2] == [
        "Steps 30 to 33, rank 0 of 2",
        "4 steps in 100.0 ms, darker and lighter in turns; between the first transfer and the last one, nothing is on "
        "the wire for 26.0 ms (orange)",
    ]
    scale = float(parsed(drawn).get("data-ms-per-px"))

    def widths_ms(kind):
        return [float(element.get("width")) * scale for element in elements(drawn, kind)]

    assert widths_ms("compute") == pytest.approx([10.0] * 4, abs=1e-2)
    assert sum(widths_ms("idle")) == pytest.approx(26.0, abs=1e-2)
    assert sum(widths_ms("wire")) == pytest.approx(4 * 12.0, abs=1e-2)
    assert len(elements(drawn, "backward-end")) == 4
    titles = [element.find(f"{SVG}title").text for element in elements(drawn, "wire")]
    assert titles[:3] == [f"step 30, fragment {number}: 4.0 ms" for number in range(3)]
    assert len({element.get("fill") for element in elements(drawn, "compute")}) == 2
