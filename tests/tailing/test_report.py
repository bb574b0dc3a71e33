"""The report of the pass about its work, for people and for programs."""

from __future__ import annotations

import json

from npu_bridge.tailing.report import NO_GRADIENTS, Fragment, TailingReport


def test_what_moved_and_what_still_waits_is_told_with_the_bytes_of_every_fragment():
    report = TailingReport(
        fragments=[Fragment(["late", "middle"], 8_000_000), Fragment(["early"], 250_000)],
        freed={"All": ["cond/Switch", "update"]},
        kept={"clipped": "Sqrt (Sqrt) is known only when the last one has arrived"},
    )
    assert report.text().splitlines() == [
        "tail optimisation: 2 fragments (8.0 MB, 0.2 MB)",
        "  All is decided from local gradients; 2 ops wait for it",
        "  clipped still waits for the last fragment: Sqrt (Sqrt) is known only when the last one has arrived",
    ]
    assert json.loads(report.json()) == {
        "fragments": [
            {"transfers": ["late", "middle"], "size_bytes": 8_000_000},
            {"transfers": ["early"], "size_bytes": 250_000},
        ],
        "freed": {"All": ["cond/Switch", "update"]},
        "kept": {"clipped": "Sqrt (Sqrt) is known only when the last one has arrived"},
        "unchanged_because": "",
        "advice": "",
    }


def test_a_graph_without_gradients_is_nothing_to_tell():
    assert not TailingReport(unchanged_because=NO_GRADIENTS).has_found_gradients
