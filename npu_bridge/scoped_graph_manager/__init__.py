"""The scope around the initialisation of variables."""
