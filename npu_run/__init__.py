"""Holds the command `npu-run`: a launcher, which starts and watches the ranks of a job, and further commands.

`job/` supervises a job, `rank/` runs inside each rank, `remote/` reaches other hosts; `doctor/`, `predict/` and
`compare/` hold commands. The library (`npu_bridge/`) never imports this package.
"""
