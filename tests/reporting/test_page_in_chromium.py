"""The page in a real browser: no error, the last step in the charts, what a pointer and the keys show, on paper."""

from __future__ import annotations

import pathlib
import re

import pytest

from npu_bridge.reporting.page import write_page
from tests.reporting.chromium import CHROMIUM, visit
from tests.reporting.test_page import write_history

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
# Added to the page that is tested: a pointer moves over the first chart, then a key goes to the last step.
VISIT = """<script>
const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
const note = name => { document.body.dataset[name] = document.getElementById("tip").textContent; };
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width * 0.5, clientY: box.top + 20}));
note("middle");
svg.dispatchEvent(new KeyboardEvent("keydown", {key: "End"}));
note("end");
document.body.dataset.background = getComputedStyle(document.body).backgroundColor;
document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth;
</script>"""


def test_pages_load_without_errors_and_show_the_last_step(tmp_path):
    losses = [5.0 - number / 60 for number in range(240)]
    write_history(tmp_path, losses, skipped={0, 1, 90}, low=100, restarts={150})
    page = tmp_path / "visited.html"
    made = pathlib.Path(write_page(str(tmp_path))).read_text()
    page.write_text(made.replace("</body>", f"{VISIT}</body>"))
    dark = "--blink-settings=preferredColorScheme=0"
    document, console = visit(page, tmp_path / "profile", "--window-size=1100,900", dark, "--dump-dom")
    assert console == []
    names = re.findall(r'data-name="(\w+)" data-last-step="(\d+)"', document)
    assert names == [(name, "237") for name in ("loss", "scale", "skipped", "rate", "speed")]
    shown = dict(re.findall(r'data-(middle|end|background|wide)="([^"]*)"', document))
    assert re.match(
        r"step 1[12]\d\nloss 2\.9\d+\nloss scale 2\^13\nlearning rate 0.25\n\d+ steps/s\nfloat32$", shown["middle"]
    )
    assert shown["end"].startswith(f"step 237\nloss {losses[-1]:.5g}\n") and shown["end"].endswith("float32")
    assert shown["background"] == "rgb(18, 22, 28)", "dark where the system is"
    assert shown["wide"] == "false"
    pointers = re.findall(r'class="pointer" d="M([\d.]+) ', document)
    assert len(pointers) == 5 and set(pointers) == {"916.0"}, "the right end of every chart"


def test_it_prints(tmp_path):
    write_history(tmp_path, [3.0, 2.0, 1.0] * 20)
    pdf = tmp_path / "page.pdf"
    visit(write_page(str(tmp_path)), tmp_path / "profile", f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    content = pdf.read_bytes()
    assert content.startswith(b"%PDF") and 1 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 2
