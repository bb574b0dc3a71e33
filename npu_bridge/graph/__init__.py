"""Reads graphs: which ops depend on which, what a run computes, which variables it changes."""
