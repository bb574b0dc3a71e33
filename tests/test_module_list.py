"""`docs/modules.md` lists the modules as they are."""

from __future__ import annotations

import importlib.util
import pathlib

TOOL = pathlib.Path(__file__).resolve().parent.parent / "tools" / "module_list.py"


def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("module_list", TOOL)
    module_list = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module_list)
    assert module_list.PAGE.read_text(encoding="utf-8") == module_list.page(), "run python tools/module_list.py"
