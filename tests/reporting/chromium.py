"""Opens pages in a real browser, where there is one."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0"),
]


def visit(page, profile, *flags):
    """The page's document after its scripts have run (`--dump-dom`), and what the console said."""
    command = [CHROMIUM, *_QUIET, f"--user-data-dir={profile}", *flags, f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def assert_page(page, last_step, profile):
    """Checks that every chart of the page reaches the step, in a browser without an error if there is one."""
    document = pathlib.Path(page).read_text()
    if CHROMIUM is not None:
        document, console = visit(page, profile, "--dump-dom")
        assert console == []
    steps = re.findall(r'data-last-step="(\d+)"', document)
    assert len(steps) >= 3 and set(steps) == {str(last_step)}
    return document
