"""`npu-run doctor`: tests with real ranks whether a job would work on this machine."""
