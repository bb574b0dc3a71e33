#!/usr/bin/env python3
"""Runs TensorFlow 1.15's own unit tests, unchanged, against the TensorFlow 1 that `npu-run` gives a script.

    git clone -b v1.15.5 --depth 1 https://github.com/tensorflow/tensorflow
    python tools/tensorflow_tests.py tensorflow --python .venv-tf115/bin/python --cache out/tensorflow_tests.json

Each test file runs in its own process, two at a time: with the genuine TensorFlow 1.15 of `--python`, and here as a
script of TensorFlow 1. A test counts if it passes with the genuine wheel; otherwise (it needs a device, a lost
operator, or a part of TensorFlow's own tree) it is not applicable. Failures are grouped by cause. `--cache` keeps the
results, and a second call continues from there; `--again` runs the files of `--only` again here.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
# The modules that public scripts use (tools/survey_names.py), as folders and patterns below the checkout.
CONTRIB = """
    checkpoint crf cudnn_rnn data estimator framework graph_editor image layers legacy_seq2seq lookup losses metrics
    mixed_precision nn opt predictor quantize recurrent resampler rnn seq2seq signal slim sparsemax staging stateless
    training util
"""
PATTERNS = (
    *(f"tensorflow/contrib/{name}/**/*_test.py" for name in CONTRIB.split()),
    "tensorflow/python/layers/**/*_test.py",
    "tensorflow/python/training/**/*_test.py",
    "tensorflow/python/kernel_tests/rnn*_test.py",
)
# The result lines of a run that did not finish.
_LINE = re.compile(r"\[ +(RUN|OK|FAILED|SKIPPED) +\] (\w+\.\w+)")
_STATUS = {"OK": "pass", "FAILED": "fail", "SKIPPED": "skip", "RUN": "fail"}


def run_file(path: str, command: list[str], environment: dict[str, str], limit_secs: float) -> dict:
    """Runs one test file.

    Returns:
      Dict from test to [status, cause]; if no test started, the only key is "", for the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Alone in its folder, since Python looks there first: some neighbours have names of Python's own modules.
        script = shutil.copy(path, folder)
        report = pathlib.Path(folder, "report.xml")
        scratch = {"TEST_TMPDIR": f"{folder}/tmp", "TEST_SRCDIR": folder, "CUDA_VISIBLE_DEVICES": ""}
        with open(f"{folder}/output.txt", "w+b") as output:
            process = subprocess.Popen(
                [*command, script, f"--xml_output_file={report}"],
                cwd=folder,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **scratch, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                end = f"exit code {process.wait(limit_secs)}"
            except subprocess.TimeoutExpired:
                end = f"not done after {limit_secs:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        if report.exists() and report.stat().st_size:  # it is opened at the start
            return read_report(report)
        found = {name: [_STATUS[word], end if word == "RUN" else ""] for word, name in _LINE.findall(text)}
        return found or {"": ["fail", f"{end}: {cause_of(text)}"]}


def read_report(path: pathlib.Path) -> dict:
    """Returns a dict from test to [status, cause], read from an XML report."""
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        # A part of a test, such as `testBasic [eager_mode]`, counts as the test, which has no line if a part fails.
        name = f"{case.get('classname', '').rpartition('.')[2]}.{(case.get('name') or '').partition(' [')[0]}"
        bad = [part for part in case if part.tag in ("failure", "error")]
        skipped = case.get("status") == "notrun" or case.find("skipped") is not None
        if bad:
            found[name] = ["fail", cause_of(bad[-1].text or "")]
        else:
            found.setdefault(name, ["skip" if skipped else "pass", ""])
    return found


def cause_of(text: str) -> str:
    """Returns the exception at the end of a traceback with its first line, without parts that vary between runs."""
    lines = [line.strip() for line in re.findall(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Empty)\b.*", text, re.M)]
    line = lines[-1] if lines else (text.strip().splitlines() or ["nothing said"])[-1]
    line = re.sub(r"( is not available) .*", r"\1", line)
    return re.sub(r"/\S*/|0x[0-9a-f]+|\w+\.py:\d+: |\d{3,}", "", line)[:160]


def module_of(path: str) -> str:
    """Returns `contrib.rnn` for a file below `tensorflow/contrib/rnn`; separate libraries have their own rows."""
    module = ".".join(path.split("/")[1:3])
    if "/feature_column" in path:
        return f"{module} (old feature columns)"
    is_of_2 = module == "contrib.seq2seq" and path.endswith("_v2_test.py")
    return f"{module} (classes for version 2)" if is_of_2 else module


class Findings:
    """The results of both sides, kept in a file.

    Args:
      path: the file; None keeps nothing.
    """

    def __init__(self, path: pathlib.Path | None):
        self._path = path
        known = path is not None and path.exists()
        self.of: dict[str, dict[str, dict]] = json.loads(path.read_text()) if path and known else {}

    def add(self, side: str, file: str, found: dict) -> None:
        self.of.setdefault(side, {})[file] = found
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(self.of, indent=0))
            fresh.replace(self._path)

    def pairs(self, files: Iterable[str]) -> Iterable[tuple[str, str, str, str, str]]:
        """Yields (file, test, status with the genuine TensorFlow 1.15, status here, cause here) for each test."""
        for file in files:
            genuine, here = (self.of.get(side, {}).get(file, {}) for side in ("genuine", "here"))
            whole = here.get("", ["missing", "not run" if not here else "no such test here"])
            for test in sorted({*genuine, *here} - {""}):
                yield (file, test, genuine.get(test, ["missing"])[0], *here.get(test, whole))


def print_table(findings: Findings, files: list[str]) -> None:
    """Prints the rates by module, as a Markdown table."""
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for file, _, genuine, here, cause in findings.pairs(files):
        counted = here if here == "pass" or "is not available" not in cause else "missing"
        counts[module_of(file)].update(["all", f"genuine {genuine}", *([counted] if genuine == "pass" else [])])
    print("| module | tests | genuine 1.15 passes | of these, here | not supplied | rate |")
    print("| --- | --- | --- | --- | --- | --- |")
    for module, count in sorted(counts.items()):
        base = count["genuine pass"]
        rate = f"{100 * count['pass'] / base:.0f} %" if base else "-"
        print(f"| `{module}` | {count['all']} | {base} | {count['pass']} | {count['missing']} | {rate} |")


def print_causes(findings: Findings, files: list[str], number: int) -> None:
    """Prints the tests that fail here and pass there, the most frequent cause first."""
    causes: dict[str, list[str]] = collections.defaultdict(list)
    for file, test, genuine, here, cause in findings.pairs(files):
        if genuine == "pass" and here != "pass":
            causes[cause or here].append(f"{module_of(file)} {pathlib.Path(file).stem}:{test}")
    for cause, tests in sorted(causes.items(), key=lambda item: -len(item[1]))[:number]:
        print(f"{len(tests):4}  {cause}\n        {', '.join(tests[:3])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="a checkout of TensorFlow 1.15, with the folder tensorflow/")
    parser.add_argument("--python", help="the interpreter of a genuine TensorFlow 1.15; without it, only here")
    parser.add_argument("--cache", type=pathlib.Path, help="a JSON file that keeps the results")
    parser.add_argument("--only", nargs="+", metavar="PART", help="files with one of these in their path: contrib/rnn")
    parser.add_argument("--again", action="store_true", help="runs the files anew here, even if they are in the cache")
    parser.add_argument("--limit", type=float, default=300, metavar="SECS", help="for one file; 300 if not given")
    parser.add_argument("--causes", type=int, default=40, metavar="N", help="number of causes to print")
    options = parser.parse_args()

    files = sorted({str(p.relative_to(options.folder)) for each in PATTERNS for p in options.folder.glob(each)})
    files = [file for file in files if not options.only or any(part in file for part in options.only)]
    sides = {"here": [sys.executable, "-m", "npu_bridge.run", "--tf1"]}
    if options.python:
        sides = {"genuine": [os.path.abspath(options.python)], **sides}
    findings = Findings(options.cache)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = {}
        for file in files:
            for side, command in sides.items():
                if file in findings.of.get(side, {}) and not (options.again and side == "here"):
                    continue
                environment = {"PYTHONPATH": str(REPOSITORY)} if side == "here" else {}
                path = str(options.folder.resolve() / file)
                jobs[pool.submit(run_file, path, command, environment, options.limit)] = (side, file)
        for number, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            side, file = jobs[job]
            findings.add(side, file, job.result())
            good = sum(status == "pass" for status, _ in job.result().values())
            print(f"{number}/{len(jobs)} {side} {file}: {good} of {len(job.result())} pass", file=sys.stderr)
    print_table(findings, files)
    print()
    print_causes(findings, files, options.causes)


if __name__ == "__main__":
    main()
