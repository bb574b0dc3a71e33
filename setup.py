"""The one thing that setup.cfg cannot say: the README with links that work away from the repository.

HOME_PAGE in the environment names the repository's page on the web; relative links then lead there, to the version that
is built. Without it they become plain words, and pictures are left out: no link of a package index leads nowhere.
"""

import os
import pathlib
import re
import runpy

from setuptools import setup

HERE = pathlib.Path(__file__).resolve().parent


def readme(home_page: str, version: str) -> str:
    """The README for a package index."""

    def elsewhere(link: re.Match) -> str:
        is_picture, words, target = link.groups()
        if re.match(r"[a-z]+:", target):
            return link.group()
        if home_page:
            return f"{is_picture}[{words}]({home_page}/{'raw' if is_picture else 'blob'}/v{version}/{target})"
        return "" if is_picture else words

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", elsewhere, (HERE / "README.md").read_text(encoding="utf-8"))


def links(home_page: str, version: str) -> dict:
    """Where the package's pages are."""
    pages = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md"}
    return {"Source": home_page, **{name: f"{home_page}/blob/v{version}/{path}" for name, path in pages.items()}}


home = os.environ.get("HOME_PAGE", "").rstrip("/")
number = runpy.run_path(str(HERE / "npu_bridge" / "base" / "version.py"))["__version__"]
setup(long_description=readme(home, number), project_urls=links(home, number) if home else {})
