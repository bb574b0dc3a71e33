"""Holds `npu-run`: the launcher, which starts and watches the ranks of a job, and the other commands.

`job/` supervises a job, `rank/` runs inside each rank, `remote/` reaches other hosts; `doctor/` and `predict/` hold
commands.
"""
