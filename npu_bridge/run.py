"""`python -m npu_bridge.run` is `npu-run`."""

from __future__ import annotations

from npu_bridge.launch.cli import main

if __name__ == "__main__":
    main()
