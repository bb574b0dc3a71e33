"""Runs ranks on other hosts: an ssh connection to each host, and an agent there that runs the host's ranks."""
