"""`docs/modules.md` lists the modules as they are."""

from __future__ import annotations

from tests.loose_code import module_at


def test_the_page_is_up_to_date():
    module_list = module_at("tools/module_list.py")
    assert module_list.PAGE.read_text(encoding="utf-8") == module_list.page(), "run python tools/module_list.py"
