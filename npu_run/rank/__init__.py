"""Runs, in the process of a rank, the script and a thread that reports to the launcher."""
