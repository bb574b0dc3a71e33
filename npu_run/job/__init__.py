"""Runs a job: places its ranks, starts and watches them, and reports which one failed first."""
