"""Makes command lines that run modules of this package in new Python processes."""

from __future__ import annotations

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# `python -m` would search the current folder first, where a random.py hides the module of the standard library.
_START = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); "
    "{root!r} in sys.path or sys.path.insert(0, {root!r}); from {module} import main; main()"
)


def module_command(module: str, *words: str) -> list[str]:
    """Returns the command that calls `main` of a module of this package, without the current folder on `sys.path`.

    Args:
      module: name of the module; its `main` finds `words` in `sys.argv[1:]`.
      words: further words of the command.
    """
    return [sys.executable, "-c", _START.format(root=_ROOT, module=module), *words]
