"""Checks that all ranks are about to run the same collectives, so that a mismatch is an error and not a hang."""
