"""Ranks on other hosts: an ssh connection to each host, and a keeper there that runs the host's ranks."""
