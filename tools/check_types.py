"""Checks the types of what scripts import, and of the README's own scripts, with mypy (its settings are in setup.cfg).

python tools/check_types.py
"""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def main() -> int:
    """Runs mypy twice: on the files of setup.cfg, and on the README's snippets as a user of the package has them."""
    options = ["--no-error-summary", "--config-file", str(REPOSITORY / "setup.cfg")]
    failed = _mypy(options)
    with tempfile.TemporaryDirectory() as folder:
        snippets = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        scripts = [pathlib.Path(folder) / f"readme_{number}.py" for number in range(1, len(snippets) + 1)]
        for script, code in zip(scripts, snippets):
            script.write_text(code, encoding="utf-8")
        failed = _mypy([*options, "--check-untyped-defs", *map(str, scripts)]) or failed
    return failed


def _mypy(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "mypy", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY)
    if done.returncode:
        print(f"types: {shlex.join(command)} ended with exit code {done.returncode}", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
