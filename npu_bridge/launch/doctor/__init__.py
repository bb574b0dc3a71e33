"""`npu-run doctor`: whether a job would work on this machine, tried with real ranks."""
