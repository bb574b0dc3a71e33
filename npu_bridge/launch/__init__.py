"""`npu-run`, the launcher: starts the ranks of a job, watches them and tells how they ended; and its other commands.

`job/` supervises, `rank/` is what runs inside each rank, `remote/` reaches other hosts; `doctor/` and `predict/` are
commands.
"""
