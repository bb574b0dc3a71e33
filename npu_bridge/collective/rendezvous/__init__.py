"""Lets the ranks of a job find each other and wait for each other: a key-value server, its client, and a barrier."""
