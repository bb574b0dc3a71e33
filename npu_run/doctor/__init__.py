"""`npu-run doctor`: starts real ranks to test whether a job would work on this machine."""
