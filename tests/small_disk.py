"""A real disk that is soon full: a small tmpfs, which takes root to mount; tests are skipped without."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted disk.

    Attributes:
      path: of its root.
    """

    def __init__(self, path: Path):
        self.path = path

    def fill(self, left_bytes: int = 0) -> None:
        """Takes what room there is, but for some."""
        with open(self.path / "filling", "ab", buffering=0) as file:
            for size in (4096, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    pass
            file.truncate(file.tell() - left_bytes)

    def make_room(self) -> None:
        (self.path / "filling").unlink()


@pytest.fixture
def small_disk(tmp_path):
    """A `SmallDisk` of 512 kB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield SmallDisk(path)
    subprocess.run(["umount", "-l", str(path)], check=True)
