"""Measures how long `import npu_bridge.npu_init` takes beside `import tensorflow`, and a start through `npu-run`.

    python benchmarks/import_time.py [--rounds 9]

Three scripts take turns, each in its own process: `import tensorflow`, the same with
`from npu_bridge.npu_init import *`, and the latter as a script of TensorFlow 1 under `npu-run`, launcher included.
Prints the median CPU times and two ratios of medians over rounds: the import (aim: at most 1.15) and the start (aim: at
most 1.10). CPU time of a process and its children does not depend on other load.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
TENSORFLOW = "import tensorflow as tf\ntf.compat.v1.placeholder\n"
NPU = TENSORFLOW + "from npu_bridge.npu_init import *\nNPUOptimizer\n"
SCRIPTS = {"import tensorflow": TENSORFLOW, "with npu_init": NPU, "under npu-run": NPU}


def cpu_secs(command: list[str], folder: str) -> float:
    """Returns user and system time of a process and of all processes that it waited for."""
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "2"}
    process = subprocess.Popen(command, cwd=folder, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name, text in SCRIPTS.items():
                script = pathlib.Path(folder, f"{name.replace(' ', '_')}.py")
                script.write_text(text)
                start = ["-m", "npu_bridge.run", "--tf1"] if name == "under npu-run" else []
                secs = cpu_secs([sys.executable, *start, script.name], folder)
                if number:  # the first round reads files that are not in a cache
                    times[name].append(secs)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, secs in medians.items():
        print(f"{name:20} {secs:6.2f} CPU s")
    bare, ours, shim = medians.values()
    print(f"npu_init over tensorflow: {ours / bare:.3f} (aim 1.15)")
    print(f"npu-run over npu_init:    {shim / ours:.3f} (aim 1.10)")


if __name__ == "__main__":
    main()
