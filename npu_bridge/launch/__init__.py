"""The command line: `npu-run` starts the ranks of a job, watches them and tells how they ended."""
