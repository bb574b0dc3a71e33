"""Provides ranks and groups under the module names that scripts for the NPU stack import."""
