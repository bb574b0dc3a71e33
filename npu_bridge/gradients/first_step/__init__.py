"""Compares the ranks before their first step, and warns if they do not train one model."""
