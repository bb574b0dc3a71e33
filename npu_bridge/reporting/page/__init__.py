"""Makes an HTML page about a training; the page needs no network and no other file.

`facts.py` records facts that only the training process knows, and `run_folder.py` reads the files of a run. `curves.py`
divides its history into buckets, and `chart.py` draws them. `failure.py` renders the error that stopped the run, and
`document.py` assembles the page.
"""

from npu_bridge.base.lazy import lazy_getattr

_PLACES = {
    "PAGE_FILE": f"{__name__}.document:PAGE_FILE",
    "PAGE_FILES": f"{__name__}.document:PAGE_FILES",
    "RunFolder": f"{__name__}.run_folder:RunFolder",
    "describe_failure": f"{__name__}.failure:describe_error",
    "note_failure": f"{__name__}.facts:note_failure",
    "note_options": f"{__name__}.facts:note_options",
    "note_run": f"{__name__}.facts:note_run",
    "read_run_folder": f"{__name__}.run_folder:read_run_folder",
    "render_page": f"{__name__}.document:render_page",
    "write_page": f"{__name__}.document:write_page",
}

__all__ = list(_PLACES)
__getattr__ = lazy_getattr(__name__, _PLACES)
