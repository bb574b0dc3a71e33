"""Ranks and groups under the names that scripts for the NPU stack import."""
