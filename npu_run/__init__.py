"""Holds the command `npu-run`: a launcher, which starts and watches the ranks of a job, and further commands."""
