"""Makes `python -m npu_bridge.run` the same as `npu-run`."""

from __future__ import annotations

from npu_run.cli import main

if __name__ == "__main__":
    main()
