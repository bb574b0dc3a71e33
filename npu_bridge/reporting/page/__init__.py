"""Makes an HTML page about a training; the page needs no network and no other file.

`facts.py` records facts that only the training process knows, and `run_folder.py` reads the files of a run. `curves.py`
divides its history into buckets, and `chart.py` draws them. `failure.py` renders the error that stopped the run, and
`document.py` assembles the page.
"""

from npu_bridge.base.lazy import lazy_getattr

_PLACES = {
    "document": ("PAGE_FILE", "PAGE_FILES", "render_page", "write_page"),
    "facts": ("note_failure", "note_options", "note_run"),
    "failure": ("describe_failure",),
    "run_folder": ("RunFolder", "read_run_folder"),
}

__all__ = sorted(name for names in _PLACES.values() for name in names)
__getattr__ = lazy_getattr(
    __name__, {name: f"{__name__}.{module}:{name}" for module, names in _PLACES.items() for name in names}
)
