"""Brings back functions of old Pythons, numpys and SciPys, for the user's files alone."""
